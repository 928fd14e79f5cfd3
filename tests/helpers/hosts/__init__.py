"""Every host as the contract tests see it. A new host is one module here and one line in ``HOSTS``."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

STAGES, MICROBATCHES = 2, 4
SECTION: dict[str, Any] = {
    "max_freeze_ratio": 0.8,
    "warmup_steps": 1,
    "monitoring_steps": 2,
    "progressive_steps": 2,
    "on_error": "raise",
}
HOSTS = {
    "deepspeed": "hosts.deepspeed_host",
    "deepspeed gpipe": "hosts.deepspeed_gpipe_host",
    "megatron": "hosts.megatron_host",
    "torch": "hosts.torch_host",
}

Tensors = dict[tuple[int, str], torch.Tensor]
"""By stage and by the name that the controller gives the parameter there."""


class Training(Protocol):
    """One rank's part of a training run of a small model: 2 stages, 4 microbatches, AdamW."""

    controller: Any  # None where freezing is not attached

    def step(self, number: int) -> list[float]:
        """Train on batch ``number``, a pure function of it; the losses that this rank sees."""

    def parameters(self) -> Tensors:
        """Copies of this rank's parameters."""

    def gradients(self) -> Tensors:
        """What the optimizer got in the last step."""

    def full_gradients(self, number: int) -> list[Tensors]:
        """Each microbatch's full gradients on batch ``number`` with today's weights, from an ordinary copy."""

    def save(self, folder: str) -> None:
        """Save the run, as the host does."""

    def load(self, folder: str) -> None:
        """Load it into a fresh run."""

    def attach(self, settings: dict[str, Any]) -> None:
        """Put freezing on a run that was built without."""

    def detach(self) -> None:
        """Take freezing off."""

    def objects(self) -> dict[str, Any]:
        """The host's objects that freezing may change: models, what updates them, what runs them."""


def setup(host: str) -> None:
    """Runs first in every rank."""
    importlib.import_module(HOSTS[host]).setup()


def teardown(host: str) -> None:
    """Runs after every call, where a host has something to let go of."""
    getattr(importlib.import_module(HOSTS[host]), "teardown", lambda: None)()


def settings_of(section: dict[str, Any], output_dir: str = "runs/tests") -> dict[str, Any]:
    return {**SECTION, "output_dir": output_dir, **section}


def build(host: str) -> Training:
    """A fresh run on this rank, to which nothing is attached yet."""
    training: Training = importlib.import_module(HOSTS[host]).build()
    return training


def forget(host: str) -> None:
    """Hold no run any longer that this process has built."""
    getattr(importlib.import_module(HOSTS[host]), "forget", lambda: None)()


def start(host: str, section: dict[str, Any] | None, output_dir: str = "runs/tests") -> Training:
    """A fresh run on this rank; what is left of the ranks are replicas. Without a section, the host alone."""
    settings = None if section is None else settings_of(section, output_dir)
    training: Training = importlib.import_module(HOSTS[host]).start(settings)
    return training
