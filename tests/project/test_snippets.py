"""The fenced blocks of README, docs and the examples' READMEs: Python runs, settings are accepted, JSON parses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, Block, blocks

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.testing.ranks import HANG_S

TORCH_PAGES = ("README.md", "docs/torch_pipelining.md")
GROUP = """
import sys, tempfile, torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank, folder, size = int(sys.argv[1]), sys.argv[2], 2
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
"""
PIPELINE = """
loss_fn = torch.nn.functional.mse_loss
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))  # the same names on both stages
stage = PipelineStage(layers, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
optimizer = torch.optim.AdamW(stage.submod.parameters())
batches = [(torch.ones(8, 4), torch.ones(8, 4))] * 2
"""
RESUMED = """
def trained():
    moments = [value for held in optimizer.state.values() for value in held.values()]
    return [*map(torch.clone, (*stage.submod.state_dict().values(), *moments))]

expected = trained()
save(folder + "/checkpoint")
with torch.no_grad():
    for value in (*layers.parameters(), *(value for held in optimizer.state.values() for value in held.values())):
        value.fill_(7.0)
load(folder + "/checkpoint")
assert len(expected) == 16 and all(map(torch.equal, trained(), expected)), trained()
"""
BOUND = """
import inspect, sys, types

def bound(function, result=None):
    '''Take the arguments that the host's own function takes, and do nothing.'''
    return lambda *args, **kwargs: [inspect.signature(function).bind(*args, **kwargs), result][1]

def module(name, **contents):
    for end in (place for place, letter in enumerate(name + ".") if letter == "."):
        sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
    vars(sys.modules[name]).update(contents)
"""
AROUND = {
    "docs/balance.md": (
        "from deepspeed.pipe import PipelineModule",
        """
cut = Cut.__new__(Cut)
cut.__dict__.update(_layer_specs=[None] * 18, stage_id=1)
cut._partition_layers()
assert (cut._local_start, cut._local_stop) == (6, 11)
""",
    ),
    "docs/megatron.md": (
        """
import tf_adapters.megatron
from megatron.core import parallel_state as real
from megatron.core.transformer import TransformerConfig as RealConfig

class TrainState:
    def state_dict(self): ...
    def load_state_dict(self, state_dict): ...

config, swift = object(), {}
module("megatron.bridge.training.gpt_step", forward_step=None)
module("megatron.bridge.training.train", train=lambda: None)
module("megatron.bridge.training.pretrain", pretrain=lambda config, forward_step, callbacks: None)
module("megatron.bridge.training.state", TrainState=TrainState)
module("swift.megatron.callbacks.base", MegatronCallback=object)
module("swift.megatron.callbacks", megatron_callbacks_map=swift)
parallel_state = types.SimpleNamespace(initialize_model_parallel=bound(real.initialize_model_parallel))
TransformerConfig = bound(RealConfig)
""",
        "assert list(swift) == ['timely_freeze']",
    ),
    "examples/megatron_gpt/README.md": (
        """
import argparse
from tf_adapters.arguments import add_arguments, config_from_args
from tf_adapters.megatron import attach as real

args = add_arguments(argparse.ArgumentParser()).parse_args(["--timely-freeze"])
model_chunks, optimizer, attach = [], None, bound(real, "attached")
""",
        "assert adapter == 'attached'",
    ),
}
"""What stands around the snippets of a page: objects of the reader's, and checks of what the snippets did."""


def python_of(page: str) -> str:
    return "\n".join(block.text for block in blocks("python") if block.page == ROOT / page)


def test_every_page_with_python_is_run() -> None:
    assert {str(block.page.relative_to(ROOT)) for block in blocks("python")} == {*TORCH_PAGES, *AROUND}


@pytest.mark.parametrize("page", TORCH_PAGES)
def test_the_snippets_for_torch_run(page: str, tmp_path: Path) -> None:
    """On two ranks in processes of their own. Stages have equal names, and the checkpoint keeps them apart."""
    script = GROUP + PIPELINE + python_of(page) + (RESUMED if "def save" in python_of(page) else "")
    script += "dist.destroy_process_group()\n"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path)],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=HANG_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


@pytest.mark.parametrize("page", AROUND)
def test_the_snippets_for_other_hosts_run(page: str, tmp_path: Path) -> None:
    """In a process of their own, with stand-ins that take the arguments of the host's functions."""
    pytest.importorskip("deepspeed" if "balance" in page else "megatron.core")
    before, after = AROUND[page]
    script = BOUND + before + "\n" + python_of(page) + "\n" + after
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_section_of_settings_is_accepted(page: Path) -> None:
    for section in re.findall(r'"timely_freeze": (\{(?:[^{}]|\{[^{}]*\})*\})', page.read_text()):
        TimelyFreezeConfig.parse(json.loads(section))


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_parses(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


@pytest.mark.parametrize("block", blocks("yaml", "toml"), ids=str)
def test_the_section_of_a_job_file_is_accepted(block: Block) -> None:
    reader: Any = pytest.importorskip("yaml" if block.language == "yaml" else "tomllib")
    read = reader.safe_load if block.language == "yaml" else reader.loads
    section = read(block.text)["timely_freeze"]
    section.pop("enable", None)
    TimelyFreezeConfig.parse(section)


@pytest.mark.programs
def test_the_call_in_readme_has_types(tmp_path: Path) -> None:
    """The wheel has py.typed, so a type checker of a user must see the settings and the adapter of each host."""
    pytest.importorskip("mypy")
    hosts = ("deepspeed", "megatron", "torch_pipelining")
    script = "from typing import Any\nschedule: Any\noptimizer: Any\n" + python_of("README.md")
    script += "\n".join(f"reveal_type(tf_adapters.{host}.attach)" for host in hosts)
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "script.py"]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}  # an editable install is a finder, which mypy does not ask
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    revealed = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert [re.findall(r"tf_adapters\.(\w+)\.adapter\.\w+ \| None", line) for line in revealed] == [[h] for h in hosts]
