"""TorchTitan jobs on two forked ranks, one after another in the same processes, which import it only once."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rank_pools import PRELOAD

from tf_adapters.testing.ranks import HANG_S, free_port

OLD = not find_spec("torchtitan") or metadata.version("torchtitan").startswith("0.2")
"""TorchTitan before 0.3: job files, and other names of a few arguments."""
MODEL: tuple[str, ...] = ("--module", "llama3", "--config", "llama3_debugmodel", "--training.disable_cuda_graphs")
if OLD:
    MODEL = (
        "--model.name",
        "llama3",
        "--model.flavor",
        "debugmodel",
        "--model.hf_assets_path",
        "tests/assets/tokenizer",
    )
TRAINING: tuple[str, ...] = (
    *("--lr_scheduler.warmup_steps", "2", "--training.local_batch_size", "4", "--training.seq_len", "16"),
    *("--metrics.log_freq", "1", "--debug.seed", "1"),
)
if OLD:
    TRAINING += ("--optimizer.name", "AdamW", "--optimizer.implementation", "for-loop", "--training.dataset", "c4_test")
    TRAINING += ("--activation_checkpoint.mode", "none")
FOLDER = "--job.dump_folder" if OLD else "--dump_folder"
PIPELINE = (
    *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B"),
    *("--parallelism.pipeline_parallel_microbatch_size", "1"),
)
FREEZING = (
    *("--timely_freeze.max_freeze_ratio", "0.8"),
    *("--timely_freeze.enable", "--timely_freeze.monitoring_steps", "4", "--timely_freeze.progressive_steps", "2"),
    *("--timely_freeze.on_error", "raise", "--timely_freeze.replan_interval", "1"),
    *("--timely_freeze.replan_threshold", "0"),
)


@dataclass
class Outcome:
    """What one rank tells of one job."""

    status: int = 0
    losses: dict[int, float] = field(default_factory=dict)  # by step; -1 on a rank without the last stage
    norms: dict[int, float] = field(default_factory=dict)  # by step, of all gradients
    figures: dict[int, dict[str, float]] = field(default_factory=dict)  # what TorchTitan logs beside them
    said: str = ""
    seconds: float = 0.0


def make_assets(folder: Path) -> None:
    """A tokenizer of bytes and a text, where TorchTitan's debug jobs look for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    assets = folder / "tests" / "assets"
    (assets / "tokenizer").mkdir(parents=True)
    (assets / "c4_test").mkdir()
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(names[-2:])
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": names[-2], "eos_token": names[-1]}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    texts = [{"text": f"Sentence {number} of a small text. " * 4} for number in range(200)]
    (assets / "c4_test" / "data.json").write_text("\n".join(map(json.dumps, texts)))


def run_jobs(folder: Path, jobs: Sequence[Sequence[str]], timeout_s: float = HANG_S) -> list[list[Outcome]]:
    """Run ``tf_adapters.trainers.torchtitan`` with each job's arguments on two ranks; by job and rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    ports = [free_port() for _ in jobs]
    with context.Pool(2) as pool:
        given = [(rank, str(folder), [list(map(str, job)) for job in jobs], ports) for rank in range(2)]
        of_ranks = pool.starmap_async(_run_jobs, given, chunksize=1).get(timeout_s)
    return [list(of_job) for of_job in zip(*of_ranks, strict=True)]


def sizes_of(files: Sequence[Path]) -> dict[str, tuple[int, Any]]:
    """By job file, the elements of its model, which is built without memory, and its freezing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with context.Pool(1) as pool:
        return pool.apply_async(_sizes_of, (list(map(str, files)),)).get(100.0)


def installs(folder: Path) -> list[Any]:
    """What installing does that is done twice; see ``_installs``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with context.Pool(1) as pool:
        return pool.apply_async(_installs, (str(folder),)).get(100.0)


def _installs(folder: str) -> list[Any]:
    """Whether a second handle is the first, what is said of other settings, whether trainers are then as before."""
    from tf_adapters.errors import ConfigError
    from tf_adapters.testing import torchtitan_on_cpu

    torchtitan_on_cpu.install()
    from tf_adapters.trainers.torchtitan import install, trainer_module

    trainer = trainer_module().Trainer
    before, found = dict(vars(trainer)), []
    for seed in (1, 2):
        handle = install({"output_dir": folder, "seed": seed})
        try:
            found.append(install({"output_dir": folder, "seed": seed}) is handle)
            install({"output_dir": folder, "seed": 3})
        except ConfigError as error:
            found.append(str(error))
        handle.revert()
        handle.revert()
        found.append(dict(vars(trainer)) == before)
    return found


def _sizes_of(files: list[str]) -> dict[str, tuple[int, Any]]:
    import importlib

    import torch

    from tf_adapters.testing import torchtitan_on_cpu
    from tf_adapters.trainers.torchtitan_settings import JobSettings

    torchtitan_on_cpu.install()
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    sizes = {}
    for file in files:
        settings, manager = JobSettings([]), ConfigManager()
        values = settings.take_section(manager._maybe_load_toml(["--job.config_file", file]))
        job = manager._dict_to_dataclass(type(manager.config), values)
        if job.experimental.custom_import:
            sys.path.insert(0, str(Path(file).parent))
            importlib.import_module(job.experimental.custom_import)
        spec = get_train_spec(job.model.name)
        with torch.device("meta"):
            model = spec.model_cls(spec.model_args[job.model.flavor])
        sizes[Path(file).stem] = (sum(p.numel() for p in model.parameters()), settings.config("out"))
    return sizes


def _run_jobs(rank: int, folder: str, jobs: list[list[str]], ports: list[int]) -> list[Outcome]:
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", HF_HUB_OFFLINE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1", HF_DATASETS_CACHE=f"{folder}/cache{rank}")
    import torch

    from tf_adapters.testing import torchtitan_on_cpu

    torch.set_num_threads(1)
    torchtitan_on_cpu.install()
    return [_run_job(job, port) for job, port in zip(jobs, ports, strict=True)]


def _run_job(arguments: list[str], port: int) -> Outcome:
    import torch.distributed as dist
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import ConfigManager

    from tf_adapters.trainers.torchtitan import main, trainer_module

    module = trainer_module()
    trainer = module.Trainer

    outcome, began = Outcome(), time.monotonic()
    os.environ["MASTER_PORT"] = str(port)
    before = {owner: dict(vars(owner)) for owner in (MetricsProcessor, ConfigManager, trainer)}
    log: Any = MetricsProcessor.log

    def logged(self: Any, step: int, loss: float, *args: Any, extra_metrics: Any = None, **kwargs: Any) -> Any:
        outcome.losses[step], outcome.norms[step], outcome.figures[step] = loss, args[1], extra_metrics
        return log(self, step, loss, *args, extra_metrics=extra_metrics, **kwargs)

    MetricsProcessor.log = logged
    sys.argv = ["tf_adapters.trainers.torchtitan", *arguments]
    module.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})  # it sleeps at its end
    parse: Any = ConfigManager.parse_args
    ConfigManager.parse_args = lambda self, args=None: parse(self, sys.argv[1:])  # read when it is imported, before 0.3
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        try:
            main()
        except SystemExit as end:
            outcome.status = int(end.code or 0)
        except Exception:
            outcome.status, outcome.said = 1, traceback.format_exc()
    outcome.said += said.getvalue()
    outcome.seconds = time.monotonic() - began
    if dist.is_initialized():
        dist.destroy_process_group()
    for owner, names in before.items():
        for name in ("log", "train", "parse_args", "_maybe_load_toml"):
            if name in names:
                setattr(owner, name, names[name])
    return outcome
