"""Trainings by Megatron-Bridge's own ``pretrain`` on two ranks, in processes that end whatever happens.

Bridge is imported once, in a process of its own, whose two forks then run one job after another:
``python tests/megatron_bridge_jobs.py JOBS`` reads a list of Job, and writes what each rank tells of each beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tf_adapters.testing.ranks import free_port

ROOT = Path(__file__).resolve().parents[1]
FREEZING = {"monitoring_steps": 4, "progressive_steps": 2, "on_error": "raise"}
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


@dataclass
class Outcome:
    """What one rank tells of one job."""

    losses: dict[int, float] = field(default_factory=dict)  # by iteration, on the rank of the last stage
    events: list[str] = field(default_factory=list)
    parameters: float = 0.0  # the sum of all, at the end
    said: str = ""
    error: str = ""


def run_jobs(folder: Path, jobs: Sequence[Job], timeout_s: float = 280.0) -> list[list[Outcome]]:
    """Run the jobs in turn on two ranks, in ``folder``; by job and rank."""
    file = folder / "jobs.pickle"
    file.write_bytes(pickle.dumps((list(jobs), [free_port() for _ in jobs])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, __file__, str(file)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # its ranks too
        process.wait()
    assert process.returncode == 0, said
    of_ranks = [pickle.loads(file.with_suffix(f".{rank}").read_bytes()) for rank in range(2)]
    return [list(of_job) for of_job in zip(*of_ranks, strict=True)]


def main() -> None:
    file = Path(sys.argv[1])
    jobs, ports = pickle.loads(file.read_bytes())
    from tf_adapters.testing import megatron_bridge_on_cpu

    megatron_bridge_on_cpu.install()
    importlib.import_module("megatron.bridge.training.pretrain")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_run_rank, args=(rank, file, jobs, ports)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


def _run_rank(rank: int, file: Path, jobs: Sequence[Job], ports: Sequence[int]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    outcomes = []
    for job, port in zip(jobs, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        outcomes.append(_run(job))
        file.with_suffix(f".{rank}").write_bytes(pickle.dumps(outcomes))


def _run(job: Job) -> Outcome:
    import torch.distributed as dist
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.initialize import destroy_global_state
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.checkpoint_utils import read_train_state

    from tf_adapters.megatron.bridge import TimelyFreezeCallback

    read_train_state.cache_clear()  # one process trains once: a later run would get the first one's
    outcome = Outcome()
    lines = logging.StreamHandler(io.StringIO())
    logging.getLogger("tf_adapters").addHandler(lines)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            ours = [] if job.section is None else [TimelyFreezeCallback(job.section)]
            pretrain(configured(job), forward_step, callbacks=[*ours, Recorder(outcome)])
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            destroy_global_state()  # as Bridge does at the end of a run
    logging.getLogger("tf_adapters").removeHandler(lines)
    outcome.said = lines.stream.getvalue()
    if dist.is_initialized():
        dist.destroy_process_group()
    return outcome


class Recorder:
    """A callback that writes down what happens."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def on_train_start(self, context: Any) -> None:
        self._outcome.events.append("train")

    def on_train_step_end(self, context: Any) -> None:
        for value in (context.loss_dict or {}).values():
            self._outcome.losses[context.state.train_state.step + 1] = float(value)

    def on_eval_end(self, context: Any) -> None:
        self._outcome.events.append("evaluation")

    def on_train_end(self, context: Any) -> None:
        self._outcome.parameters = sum(float(p.double().sum()) for chunk in context.model for p in chunk.parameters())
        self._outcome.events.append("end")


def configured(job: Job) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config as names

    model = {
        **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "seq_length": 16},
        **{"vocab_size": 128, "transformer_layer_spec": local_layer_spec, "pipeline_dtype": torch.float32},
        **{"pipeline_model_parallel_size": job.stages, "share_embeddings_and_output_weights": False},
        **{"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False},
        **{"bias_dropout_fusion": False, "bias_activation_fusion": False, "cross_entropy_loss_fusion": False},
        **{"apply_rope_fusion": False, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    }
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


if __name__ == "__main__":
    from megatron_bridge_jobs import main as main_of_module  # what it writes is read by the module's name

    main_of_module()
