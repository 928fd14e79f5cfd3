"""Shared by tests of the examples: arguments of a short frozen run, and parts of its output."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from launching import ROOT

FREEZE = {
    "max-freeze-ratio": 0.8,
    "warmup-steps": 1,
    "monitoring-steps": 4,
    "progressive-steps": 2,
    "on-error": "raise",
    "report-every": 1,
}
SAVED_AT, STEPS = 18, 21  # the report says "stable" from the tenth stable step on
PHASES = [
    "step 2: monitoring, every second step with drawn freeze ratios",
    "step 6: progressive freezing",
    "step 8: stable freezing",
]


def load_example(file: str) -> ModuleType:
    """Import a file of the examples under a name that no other test can clash with."""
    qualified = f"examples_{file.removesuffix('.py').replace('/', '_')}"
    spec = importlib.util.spec_from_file_location(qualified, ROOT / "examples" / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def freezing(folder: Path, **more: object) -> list[str]:
    """Return the arguments of a run that freezes and writes its report into ``folder``."""
    settings = {**FREEZE, "output-dir": folder, **more}
    return ["--timely-freeze", *(f"--timely-freeze-{name}={value}" for name, value in settings.items())]


def said(output: str) -> list[str]:
    """Return our log lines, without the time."""
    return [line.split("timely_freeze: ", 1)[1] for line in output.splitlines() if "] timely_freeze: " in line]


def losses(output: str) -> dict[int, str]:
    """Return the printed training losses by step."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+): loss ([\d.]+),", output, re.MULTILINE)}


def held_out(output: str) -> list[float]:
    """Return the printed held-out losses."""
    return [float(loss) for loss in re.findall(r"held-out loss (\d+\.\d+)", output)]
