"""ms-swift's own Megatron trainer on a tiny GPT in two pipeline stages; see ``forked_jobs``.

Real: ``MegatronTrainer`` with its loop, step, loss, samplers, callbacks, logs and Megatron checkpoints, Megatron-Core's
schedule, DDP and optimizer. Stand-ins: the building of the model from Hugging Face weights (``mcore_bridge``, which
needs Transformer Engine), the template that makes batches, the warm-up of fused kernels.
"""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import forked_jobs
import megatron_ranks as ranks
import torch
from forked_jobs import FREEZING, StandIn, Told, digest

CASE = ranks.Case(pp=2, model={"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16})
JOBS: dict[str, dict[str, Any]] = {
    "alone": {"where": "alone"},
    "nothing frozen": {"where": "nothing", "section": {**FREEZING, "max_freeze_ratio": 0.0}},
    "whole": {"where": "run", "section": FREEZING},
    "resumed": {"where": "resumed", "section": FREEZING, "mcore_model": "run/checkpoint-8"},
    "wrong setting": {"where": "wrong", "section": {"max_freeze_ratio": 6}},
}


class Arguments(forked_jobs.Arguments):
    """Megatron-Core's configs keep their own defaults."""

    def __getattr__(self, name: str) -> Any:
        if name in _of_configs():
            raise AttributeError(name)
        return super().__getattr__(name)


def _of_configs() -> set[str]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import AdamOptimizerConfig

    asked = {"use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "align_param_gather"}
    configs = (AdamOptimizerConfig, DistributedDataParallelConfig)
    return {field.name for config in configs for field in fields(config)} - asked


def prepare() -> None:
    import swift.sequence_parallel  # noqa: F401  # compiles a function, which must be torch's own

    from tf_adapters.testing import megatron_on_cpu

    megatron_on_cpu.install()
    for name in ("mcore_bridge", "mcore_bridge.utils", "mcore_bridge.model", "mcore_bridge.config"):
        sys.modules[name] = StandIn(name)
    base = importlib.import_module("swift.megatron.trainers.base")
    vars(base)["warmup_jit_function"] = lambda config, args: None
    vars(torch.cuda)["max_memory_reserved"] = lambda: 0
    import tf_adapters.megatron.swift  # noqa: F401


def run(job: dict[str, Any], folder: Path, told: Told) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    loaded = str(folder / job["mcore_model"]) if "mcore_model" in job else None
    (folder / job["where"]).mkdir(exist_ok=True)
    trainer = _trainer(folder / job["where"], job.get("section"), loaded, told)
    trainer.train(_samples(), None)
    ours = [callback for callback in trainer.callbacks if type(callback).__name__ == "TimelyFreezeCallback"]
    told.more["detached"] = all(callback.adapter is None for callback in ours)
    told.parameters = digest(parameter for model in trainer.unwrapped_models for parameter in model.parameters())


def _samples() -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(ranks.VOCABULARY, (64, ranks.CONTEXT + 1), generator=generator)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]


def _trainer(folder: Path, section: dict[str, Any] | None, loaded: str | None, told: Told) -> Any:
    from swift.megatron.trainers import MegatronTrainer
    from swift.megatron.utils import wrap_model

    class Trainer(MegatronTrainer):  # type: ignore[misc]
        """With a model of ours, and batches that it takes."""

        def prepare_model(self) -> None:
            chunks = map(ranks.innermost, ranks.build_chunks(CASE, wrap=False))
            self.unwrapped_models = self.peft_models = list(chunks)
            self.config, self.bridge = self.unwrapped_models[0].config, None
            self.wrapped_models = wrap_model(self.args, self.unwrapped_models)

        def get_batch(self, data_iterator: Any, vp_stage: Any = None) -> Any:
            tokens = next(data_iterator)
            causal = torch.triu(torch.ones(1, 1, ranks.CONTEXT, ranks.CONTEXT, dtype=torch.bool), diagonal=1)
            positions = torch.arange(ranks.CONTEXT).expand_as(tokens["input_ids"])
            return {**tokens, "position_ids": positions, "attention_mask": causal}

        def on_log(self, logs: Any, prefix: str = "") -> None:
            super().on_log(logs, prefix)
            told.losses[self.state.iteration] = logs["loss"]
            told.figures[self.state.iteration] = {k: v for k, v in logs.items() if "timely" in k}

    ranks.initialize(CASE)
    args = _arguments(folder, loaded)
    if section is not None:  # what the plugin file does
        from tf_adapters.megatron.swift import register

        register(section)
        args.callbacks = ["timely_freeze", *args.callbacks]
    template = types.SimpleNamespace(padding_free=None, config=None, data_collator=_collate, use_chat_template=True)
    return Trainer(args, template)


def _collate(rows: list[dict[str, Any]], padding_to: Any = None) -> dict[str, Any]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _arguments(folder: Path, mcore_model: str | None) -> Any:
    return Arguments(
        output_dir=str(folder),
        mcore_model=mcore_model,
        model_dir=str(folder),
        tuner_type="full",
        task_type="causal_lm",
        router_replay_mode="disabled",
        callbacks=["print", "default_flow"],
        train_iters=12,
        eval_iters=0,
        save_steps=8,
        logging_steps=1,
        num_microbatches=4,
        micro_batch_size=2,
        global_batch_size=8,
        seq_length=ranks.CONTEXT,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=2,
        context_parallel_size=1,
        dataloader_num_workers=0,
        bf16=True,
        fp16=False,
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-2,
        lr_warmup_init=0.0,
        lr_warmup_iters=0,
        lr_decay_style="constant",
        start_weight_decay=0.1,
        end_weight_decay=0.1,
        weight_decay=0.1,
        weight_decay_incr_style="constant",
        clip_grad=1.0,
        params_dtype=torch.bfloat16,
        accumulate_allreduce_grads_in_fp32=True,
    )
