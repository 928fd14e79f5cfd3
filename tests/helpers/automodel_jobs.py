"""Jobs of NeMo AutoModel's own recipe, on a tiny Llama in two pipeline stages; see ``forked_jobs``."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from forked_jobs import FREEZING, Told, digest

JOB: dict[str, Any] = {
    "step_scheduler": {
        "global_batch_size": 4,
        "local_batch_size": 4,
        "ckpt_every_steps": 10,
        "val_every_steps": 1000,
        "num_epochs": 1,
        "max_steps": 14,
    },
    "dist_env": {"backend": "gloo", "timeout_minutes": 3},
    "seed": 7,
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "config": {
            "_target_": "transformers.LlamaConfig",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "architectures": ["LlamaForCausalLM"],
        },
        "force_hf": True,
        "attn_implementation": "sdpa",
        "torch_dtype": "float32",
        "use_liger_kernel": False,
    },
    "distributed": {
        "strategy": "fsdp2",
        "pp_size": 2,
        "tp_size": 1,
        "cp_size": 1,
        "pipeline": {"pp_schedule": "1f1b", "pp_microbatch_size": 1, "scale_grads_in_schedule": False},
    },
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "dataset": {
        "_target_": "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset",
        "num_sentences": 64,
        "vocab_size": 64,
        "mean_len": 15,
        "std_len": 0,
        "max_sentence_len": 15,
        "tokenizer": None,
    },
    "dataloader": {
        "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
        "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
        "shuffle": False,
    },
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1.0e-3},
    "lr_scheduler": {"lr_decay_style": "constant", "lr_warmup_steps": 2, "min_lr": 1.0e-3},
}
BY_ITS_WARMUP = {**FREEZING, "warmup_steps": "auto"}
EXACT = {**BY_ITS_WARMUP, "goal": "exact", "max_freeze_ratio": 0.0}
DEFERRED_TOKENS = {"weight_gradients": "deferred", "granularity": "token", "max_freeze_ratio": 0.4}
LARGER_BATCH = {**JOB["step_scheduler"], "global_batch_size": 8, "max_steps": 8}
SAVED = {"enabled": True, "model_save_format": "torch_save", "save_consolidated": False}
CHUNKED = {"_target_": "nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy", "compile": False}
JOBS: dict[str, dict[str, Any]] = {
    "alone": {"where": "alone"},
    "nothing frozen": {"where": "nothing", "timely_freeze": {**BY_ITS_WARMUP, "max_freeze_ratio": 0.0}},
    "exact": {"where": "exact", "timely_freeze": EXACT},
    "tokens": {"where": "tokens", "timely_freeze": {**BY_ITS_WARMUP, **DEFERRED_TOKENS}},
    "larger batch": {"where": "alone", "step_scheduler": LARGER_BATCH},
    "larger batch, exact": {"where": "larger", "step_scheduler": LARGER_BATCH, "timely_freeze": EXACT},
    "whole": {"where": "run", "timely_freeze": BY_ITS_WARMUP, "checkpoint": SAVED},
    "resumed": {
        "where": "resumed",
        "timely_freeze": BY_ITS_WARMUP,
        "checkpoint": {**SAVED, "restore_from": "run/epoch_0_step_9"},
    },
    "linear loss": {"where": "linear", "timely_freeze": BY_ITS_WARMUP, "loss_fn": CHUNKED},
    "no section": {"where": "none"},
    "wrong setting": {"where": "wrong", "timely_freeze": {"max_freeze_ratio": 6}},
}


def prepare() -> None:
    from tf_adapters.testing import automodel_on_cpu

    automodel_on_cpu.install()
    import tf_adapters.trainers.automodel  # noqa: F401


def run(job: dict[str, Any], folder: Path, told: Told) -> None:
    import torch.distributed as dist
    from nemo_automodel.recipes.llm import train_ft

    from tf_adapters.trainers import automodel

    rank = os.environ["RANK"]
    os.environ.update(WANDB_MODE="disabled", HF_DATASETS_CACHE=f"{folder}/cache{rank}")
    recipe = train_ft.TrainFinetuneRecipeForNextTokenPrediction
    log = recipe.log_train_metrics

    def logged(self: Any, data: Any) -> None:
        told.losses[data.step] = data.metrics["loss"]
        told.figures[data.step] = {k: v for k, v in data.metrics.items() if k.startswith("timely_freeze")}
        adapter = getattr(getattr(self, "timely_freeze", None), "adapter", None)
        if adapter is not None:
            units = adapter.controller.pipeline.units
            told.more["units"] = {stage: [n for unit in of for n in unit.names] for stage, of in units.items()}
        told.more["packages"] = {type(m).__module__.split(".")[0] for part in self.model_parts for m in part.modules()}
        told.parameters = digest(parameter for model in self.model_parts for parameter in model.parameters())
        log(self, data)

    file = _config(job, folder)
    sys.argv = ["job", "-c", str(file)]
    recipe.log_train_metrics = logged
    try:
        (train_ft.main if job["where"] == "alone" else automodel.main)(str(file))
    finally:
        recipe.log_train_metrics = log
        if dist.is_initialized():
            dist.destroy_process_group()


def _config(job: dict[str, Any], folder: Path) -> Path:
    changes = copy.deepcopy({name: value for name, value in job.items() if name != "where"})
    checkpoint = {"enabled": False, **changes.pop("checkpoint", {}), "checkpoint_dir": str(folder / job["where"])}
    if "restore_from" in checkpoint:
        checkpoint["restore_from"] = str(folder / checkpoint["restore_from"])
    file = folder / f"{job['where']}-{os.environ['RANK']}.yaml"
    file.write_text(yaml.safe_dump({**copy.deepcopy(JOB), **changes, "checkpoint": checkpoint}))
    return file
