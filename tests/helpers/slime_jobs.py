"""slime's own training of rollouts with Megatron, on a tiny GPT in two pipeline stages; see ``forked_jobs``.

Real: slime's ``train`` and ``save``, its loss, batches, logs and hook, Megatron-Core's schedule, DDP and optimizer;
Transformer Engine's layers where it is there, its kernels answered by torch. Stand-ins: Ray, wandb and whatever else of
slime's imports is not installed; attention over packed sequences, which needs a kernel of Transformer Engine (a
microbatch is one sample here); the writing of Megatron's checkpoint.
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import megatron_ranks as ranks
import torch
from forked_jobs import FREEZING, StandIn, Told, digest

from tf_adapters.testing import transformer_engine_on_cpu

HOOK = "tf_adapters.trainers.slime.before_train_step"
CASE = ranks.Case(pp=2, engine=transformer_engine_on_cpu.available())
JOBS: dict[str, dict[str, Any]] = {
    "alone": {"where": "alone"},
    "nothing frozen": {"where": "nothing", "timely_freeze": {**FREEZING, "max_freeze_ratio": 0.0}},
    "whole": {"where": "run", "timely_freeze": FREEZING, "save_at": 2},
    "resumed": {"where": "run", "timely_freeze": FREEZING, "begin_at": 3},
    "critic": {"where": "critic", "timely_freeze": FREEZING, "role": "critic", "rollouts": 1},
    "wrong setting": {"where": "wrong", "timely_freeze": {"max_freeze_ratio": 6}},
}


class Arguments(Namespace):
    """slime has hundreds: those that are not set are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def prepare() -> None:
    sys.path[:0] = [os.environ["SLIME_SOURCE"], os.environ["MEGATRON_LM_SOURCE"]]
    from tf_adapters.testing import megatron_lm_on_cpu

    megatron_lm_on_cpu.install(engine=CASE.engine)
    while True:  # until nothing is missing
        try:
            importlib.import_module("slime.backends.megatron_utils.model")
            break
        except ModuleNotFoundError as error:
            if not error.name or error.name.split(".")[0] in ("slime", "megatron"):
                raise
            sys.modules[error.name] = StandIn(error.name)
            print("a stand-in for", error.name)
    import tf_adapters.trainers.slime  # noqa: F401


def run(job: dict[str, Any], folder: Path, told: Told) -> None:
    from slime.backends.megatron_utils import model as host

    from tf_adapters.trainers import slime as door

    def log(args: Any, metrics: dict[str, Any], step_key: str) -> None:
        step = metrics[step_key]
        told.losses[step] = next(value for name, value in metrics.items() if name.endswith("loss"))
        told.figures[step] = {name: value for name, value in metrics.items() if "timely_freeze" in name}

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    before = host.logging_utils.log, host.save_checkpoint
    host.logging_utils.log, host.save_checkpoint = log, _save
    try:
        told.parameters = _train(host, folder, **job)
    finally:
        door.detach()
        told.more["restored"] = (host.logging_utils.log, host.save_checkpoint) == (log, _save)
        host.logging_utils.log, host.save_checkpoint = before


def _train(
    host: Any,
    folder: Path,
    where: str,
    timely_freeze: dict[str, Any] | None = None,
    role: str = "actor",
    rollouts: int = 4,
    begin_at: int = 0,
    save_at: int | None = None,
) -> str:
    from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training import global_vars

    ranks.initialize(CASE)
    args = _arguments(folder / where, timely_freeze, finetune=not begin_at)
    global_vars.unset_global_variables()
    global_vars.set_args(args)
    sizes = {"global_batch_size": 4, "micro_batch_size": 1, "data_parallel_size": 1}
    reconfigure_num_microbatches_calculator(rank=0, rampup_batch_size=None, **sizes)  # as slime's own init does
    chunks = [_without_packing(chunk) for chunk in ranks.build_chunks(CASE)]
    chunks[0].role = role
    optimizer = ranks.build_optimizer(CASE, chunks)
    steady: dict[str, Any] = {"init_lr": 1e-2, "max_lr": 1e-2, "min_lr": 1e-2, "lr_decay_style": "constant"}
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 100, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(optimizer, lr_warmup_steps=0, lr_decay_steps=1000, **steady, **decay)
    if begin_at:
        _load(args, chunks, optimizer)
    for rollout in range(begin_at, rollouts):
        data, counts = _rollout(rollout)
        host.train(rollout, chunks, optimizer, scheduler, data, counts, counts)
        if rollout == save_at:
            host.save(rollout, chunks, optimizer, scheduler)
    return digest(parameter for chunk in chunks for parameter in chunk.parameters())


def _arguments(folder: Path, section: dict[str, Any] | None, finetune: bool) -> Any:
    set_ones = {
        "save": str(folder),
        "load": str(folder),
        "seq_length": ranks.CONTEXT,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "data_pad_size_multiplier": ranks.CONTEXT,
        "finetune": finetune,  # as slime sets it without a checkpoint
        "check_for_nan_in_loss_and_grad": True,
        "loss_type": "sft_loss",
        "log_probs_chunk_size": -1,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "qkv_format": "thd",
    }
    args = Arguments(**set_ones)
    if section is not None:  # what --custom-config-path sets
        args.timely_freeze = section
        args.custom_megatron_before_train_step_hook_path = HOOK
    return args


def _rollout(rollout: int) -> tuple[list[Any], list[int]]:
    """One rollout of three steps of four microbatches, one sample each."""
    from slime.backends.megatron_utils.data import DataIterator

    counts, length = [4, 4, 4], ranks.CONTEXT
    generator = torch.Generator().manual_seed(rollout)
    samples = range(sum(counts))
    data = {
        "tokens": [torch.randint(ranks.VOCABULARY, (length,), generator=generator) for _ in samples],
        "total_lengths": [length for _ in samples],
        "response_lengths": [length - 2 for _ in samples],
        "loss_masks": [torch.ones(length - 2, dtype=torch.int) for _ in samples],
        "rollout_mask_sums": [torch.tensor(float(length - 2)) for _ in samples],
    }
    return [DataIterator(data, [[sample] for sample in samples])], counts


def _without_packing(chunk: Any) -> Any:
    """Megatron-Core's attention takes packed sequences with Transformer Engine only: here is one to a microbatch."""
    model = ranks.innermost(chunk)
    forward = model.forward
    causal = torch.triu(torch.ones(1, 1, ranks.CONTEXT, ranks.CONTEXT, dtype=torch.bool), diagonal=1)

    def plain(input_ids: Any, labels: Any = None, **_: Any) -> Any:
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0)
        return forward(input_ids, positions, causal, labels=labels)

    vars(model)["forward"] = plain
    return chunk


def _save(iteration: int, chunks: Any, optimizer: Any, scheduler: Any, **_: Any) -> None:
    from megatron.training import get_args

    folder = Path(get_args().save) / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    state = [chunk.state_dict() for chunk in chunks], optimizer.state_dict()
    torch.save(state, folder / f"{torch.distributed.get_rank()}.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    torch.distributed.barrier()


def _load(args: Any, chunks: Any, optimizer: Any) -> None:
    folder = Path(args.load)
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    file = folder / f"iter_{iteration:07d}" / f"{torch.distributed.get_rank()}.pt"
    models, state = torch.load(file, weights_only=False)
    for chunk, values in zip(chunks, models, strict=True):
        chunk.load_state_dict(values)
    optimizer.load_state_dict(state)
