"""The base of all trainers' modules: figures for logs, the state for checkpoints, begin and end."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tf_adapters.config import SECTION
from tf_adapters.errors import UnsupportedError
from tf_adapters.hosts.adapter import HostAdapter
from tf_adapters.log import announce

_FILE = f"{SECTION}.json"


class TrainerRun:
    """Freezing in one training of a trainer. The adapter calls it with the figures of each step.

    Attributes:
        adapter: the host's adapter during training; None before, after, and if ``enabled`` is false.
        figures: the figures of the newest step, by their names in the trainer's log, which begin with ``prefix``.
    """

    prefix = f"{SECTION}/"

    def __init__(self) -> None:
        self.adapter: Any = None
        self.figures: dict[str, float] = {}

    def due(self) -> bool:
        """Return whether the trainer logs the step that has ended."""
        return True

    def __call__(self, figures: Mapping[str, float]) -> None:
        """Store the figures of a step."""
        self.figures = {f"{self.prefix}{name}": value for name, value in figures.items()}

    def begin(
        self,
        attach: Callable[..., HostAdapter | None],
        warmup: int,
        saved: Callable[[], str | bytes] | None = None,
    ) -> None:
        """Attach, and resume from the saved state if the trainer resumes from a checkpoint. Called on all ranks.

        ``saved`` reads the state's text, of which rank 0's counts. If it cannot be read, freezing starts from its
        beginning.
        """
        self.adapter, self.figures = None, {}
        adapter = attach(metrics=self, warmup_steps=warmup)
        if adapter is not None and saved is not None:
            with adapter.abandoned_on_error():
                adapter.controller.load_state_dict(_decoded(saved), warmup)
        self.adapter = adapter

    def state_text(self) -> str | None:
        """Return the state for a checkpoint, as JSON; None without an adapter."""
        return None if self.adapter is None else json.dumps(self.adapter.controller.state_dict())

    def write_state(self, folder: str | Path) -> None:
        """Write the state into a checkpoint's folder, on rank 0. If the disk fails, log it and go on."""
        text = self.state_text()
        if text is None or self.adapter.collectives.rank != 0:
            return
        path = Path(folder) / _FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            announce(0, f"the state cannot be saved in {path} ({error.strerror}): a resumed run monitors anew")

    def end(self) -> None:
        """Write the last report and restore the host, at the end of a training. Called on all ranks.

        Do not call it after an error, when other ranks may be gone; the report is then written when the process ends.
        If other code has wrapped our functions, log a warning and leave the host as it is.
        """
        try:
            self.detach()
        except UnsupportedError as error:
            announce(self.adapter.collectives.rank, str(error), logging.WARNING)
            self.adapter = None

    def detach(self) -> None:
        """Do as ``end``, but raise UnsupportedError, on all ranks, if other code has wrapped our functions."""
        if self.adapter is not None:
            self.adapter.detach()
            self.adapter = None


def read_state(folder: str | Path) -> str:
    """Return the text that ``write_state`` has written into a checkpoint's folder."""
    return (Path(folder) / _FILE).read_text()


def _decoded(saved: Callable[[], str | bytes]) -> Any:
    try:
        return json.loads(saved())
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        return None
