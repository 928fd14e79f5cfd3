"""The base of the ways into trainers: figures in their logs, the state in their checkpoints, begin and end."""

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
    """Freezing in one training of a trainer; the adapter gives it the figures of each step.

    Attributes:
        adapter: the host's adapter while it freezes; None before, after, and where ``enabled`` is false.
        figures: those of the newest step, by the name that the trainer logs, which begins with ``prefix``.
    """

    prefix = f"{SECTION}/"

    def __init__(self) -> None:
        self.adapter: Any = None
        self.figures: dict[str, float] = {}

    def due(self) -> bool:
        """Return whether the trainer logs the step that has ended."""
        return True

    def __call__(self, figures: Mapping[str, float]) -> None:
        """Take the figures of a step."""
        self.figures = {f"{self.prefix}{name}": value for name, value in figures.items()}

    def begin(
        self,
        attach: Callable[..., HostAdapter | None],
        warmup: int,
        saved: Callable[[], str | bytes] | None = None,
    ) -> None:
        """Attach, and go on from a state where the trainer goes on from a checkpoint. Called on all ranks.

        ``saved`` reads the state's text. Rank 0's counts; freezing begins anew where it cannot be read.
        """
        self.adapter, self.figures = None, {}
        adapter = attach(metrics=self, warmup_steps=warmup)
        if adapter is not None and saved is not None:
            with adapter.abandoned_on_error():
                adapter.controller.load_state_dict(_decoded(saved), warmup)
        self.adapter = adapter

    def state_text(self) -> str | None:
        """The state for a checkpoint, as JSON; None where nothing freezes."""
        return None if self.adapter is None else json.dumps(self.adapter.controller.state_dict())

    def write_state(self, folder: str | Path) -> None:
        """Write the state into a checkpoint's folder, on rank 0; a disk that fails costs the state and not the run."""
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
        """Leave the last report and give the host back as it was, at the end of a training. Called on all ranks.

        Not after an error, when other ranks may be gone: the end of the process writes the report then. Where other
        code has wrapped ours, the host stays as it is, with a warning.
        """
        try:
            self.detach()
        except UnsupportedError as error:
            announce(self.adapter.collectives.rank, str(error), logging.WARNING)
            self.adapter = None

    def detach(self) -> None:
        """Do as ``end``, but raise UnsupportedError, on all ranks, where other code has wrapped ours."""
        if self.adapter is not None:
            self.adapter.detach()
            self.adapter = None


def read_state(folder: str | Path) -> str:
    """The text that ``write_state`` has left in a checkpoint's folder."""
    return (Path(folder) / _FILE).read_text()


def _decoded(saved: Callable[[], str | bytes]) -> Any:
    try:
        return json.loads(saved())
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        return None
