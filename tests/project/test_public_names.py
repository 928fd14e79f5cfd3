"""What ``import tf_adapters`` offers, and what it does not import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import tf_adapters


@pytest.mark.parametrize("name", tf_adapters.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(tf_adapters, name) is not None


def test_a_host_is_reached_by_attribute_and_importing_the_package_imports_none() -> None:
    """In a process of its own: other tests have imported hosts already."""
    code = (
        "import sys, tf_adapters\n"
        "tf_adapters.TimelyFreezeConfig()\n"
        "assert not {'torch', 'deepspeed', 'megatron'} & sys.modules.keys()\n"
        "assert callable(tf_adapters.torch_pipelining.attach)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'torch_pipelinig'"):
        _ = tf_adapters.torch_pipelinig


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("tf_adapters.torchtitan", "tf_adapters.trainers.torchtitan", "install"),
        ("tf_adapters.megatron.bridge", "tf_adapters.trainers.bridge", "TimelyFreezeCallback"),
        ("tf_adapters.megatron.slime", "tf_adapters.trainers.slime", "before_train_step"),
    ],
)
def test_an_older_path_is_the_same_object(old: str, new: str, name: str) -> None:
    assert getattr(importlib.import_module(old), name) is getattr(importlib.import_module(new), name)


def test_the_older_command_for_torchtitan_runs() -> None:
    command = [sys.executable, "-m", "tf_adapters.torchtitan", "--help"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert said.startswith("usage: torchrun [...] -m tf_adapters.trainers.torchtitan ")
