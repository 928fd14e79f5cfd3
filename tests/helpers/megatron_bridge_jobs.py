"""Trainings by Megatron-Bridge's own ``pretrain`` on its mock data, in two pipeline stages; see ``forked_jobs``.

Real: all of Megatron-Bridge, and Megatron-Core's schedule, DDP, optimizer and checkpoints. Stand-ins: CUDA, ModelOpt,
NVIDIA's resiliency extension, Transformer Engine and Triton, whose names are empty. Jobs with ``engine`` have
Transformer Engine's layers (``megatron_bridge_engine_jobs``), all others Megatron's own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from forked_jobs import FREEZING, Told, digest

BY_ITS_WARMUP = {**FREEZING, "warmup_steps": "auto"}
SAVED = 6
"""Checkpoints are saved after every so many iterations."""


@dataclass(frozen=True)
class Job:
    """One call of ``pretrain``: a GPT of 4 layers, 8 samples in microbatches of 2, evaluated after 4 iterations."""

    section: dict[str, Any] | None = None  # of the callback's settings; None: Bridge alone
    iterations: int = 12
    save: str | None = None
    load: str | None = None
    stages: int = 2  # or 1, with two replicas
    ddp: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    skip_train: bool = False
    engine: bool = False


def _freezing(output_dir: str, **settings: Any) -> dict[str, Any]:
    return {**BY_ITS_WARMUP, "output_dir": output_dir, **settings}


AT_SAVED = {"ckpt_step": SAVED}
OVERLAPS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
JOBS = {
    "alone": Job(save="alone"),
    "nothing frozen": Job(section=_freezing("nothing", max_freeze_ratio=0.0)),
    "disabled": Job(section={"enabled": False}, iterations=2),
    "whole": Job(section=_freezing("run"), save="run"),
    "resumed": Job(section=_freezing("resumed"), load="run", checkpoint=AT_SAVED),
    "without us": Job(load="run", checkpoint=AT_SAVED),
    "without a state": Job(section=_freezing("anew"), load="alone", checkpoint=AT_SAVED),
    "no pipeline": Job(section=_freezing("no_pipeline"), stages=1, ddp=OVERLAPS),
    "evaluated only": Job(section=_freezing("evaluated"), skip_train=True),
    "refused": Job(section=_freezing("refused", schedule="gpipe"), iterations=2),
    "wrong setting": Job(section={"max_freeze_ratio": 6}),
}


def prepare() -> None:
    from tf_adapters.testing import megatron_bridge_on_cpu

    megatron_bridge_on_cpu.install()
    importlib.import_module("megatron.bridge.training.pretrain")


def run(job: Job, folder: Path, told: Told) -> None:
    import torch.distributed as dist
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.checkpoint_utils import read_train_state

    from tf_adapters.trainers.bridge import TimelyFreezeCallback

    read_train_state.cache_clear()  # one process trains once: a later run would get the first one's
    told.more["events"] = []
    try:
        ours = [] if job.section is None else [TimelyFreezeCallback(job.section)]
        pretrain(configured(job), forward_step, callbacks=[*ours, Recorder(told)])
    except Exception:
        destroy_global_state()  # as Bridge does at the end of a run
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Recorder:
    """A callback that writes down what happens."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def on_train_start(self, context: Any) -> None:
        self._told.more["events"].append("train")

    def on_train_step_end(self, context: Any) -> None:
        for value in (context.loss_dict or {}).values():
            self._told.losses[context.state.train_state.step + 1] = float(value)

    def on_eval_end(self, context: Any) -> None:
        self._told.more["events"].append("evaluation")

    def on_train_end(self, context: Any) -> None:
        self._told.parameters = digest(p for chunk in context.model for p in chunk.parameters())
        self._told.more["events"].append("end")


def configured(job: Job) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider, default_layer_spec, local_layer_spec
    from megatron.bridge.training import config as names
    from megatron.core.transformer.enums import AttnBackend

    model = {
        **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "seq_length": 16},
        **{"vocab_size": 128, "transformer_layer_spec": local_layer_spec, "pipeline_dtype": torch.float32},
        **{"pipeline_model_parallel_size": job.stages, "share_embeddings_and_output_weights": False},
        **{"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False},
        **{"bias_dropout_fusion": False, "bias_activation_fusion": False, "cross_entropy_loss_fusion": False},
        **{"apply_rope_fusion": False, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    }
    if job.engine:
        model |= {"transformer_layer_spec": default_layer_spec, "attention_backend": AttnBackend.unfused}
    training = {"train_iters": job.iterations, "global_batch_size": 8, "micro_batch_size": 2}
    evaluation = {"eval_interval": 4, "eval_iters": 1, "skip_train": job.skip_train}
    separate = hasattr(names, "ValidationConfig")  # from 0.4
    more = {"validation": names.ValidationConfig(**evaluation)} if separate else {}
    distributed = job.ddp.get("use_distributed_optimizer", False)
    return names.ConfigContainer(
        model=GPTModelProvider(**model),
        train=names.TrainingConfig(**training, **({} if separate else evaluation)),
        optimizer=names.OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, clip_grad=1.0, use_distributed_optimizer=distributed
        ),
        scheduler=names.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=2,
            lr_decay_iters=12,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=names.DistributedDataParallelConfig(**{"use_distributed_optimizer": False, **job.ddp}),
        dataset=names.MockGPTDatasetConfig(
            random_seed=1,
            seq_length=16,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_dataset_builder_threads=1,
            dataloader_type="single",
            num_workers=0,
        ),
        logger=names.LoggerConfig(log_interval=4, tensorboard_dir=f"{job.save}/logs" if job.save else None),
        tokenizer=names.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=names.CheckpointConfig(
            save=job.save, load=job.load, save_interval=SAVED, ckpt_format="torch_dist", **job.checkpoint
        ),
        dist=names.DistributedInitConfig(distributed_backend="gloo"),
        rng=names.RNGConfig(seed=3),
        **more,
    )
