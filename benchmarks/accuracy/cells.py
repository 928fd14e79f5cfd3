"""The runs of the accuracy study, and its result file with one JSON line for each finished run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.accuracy.tasks import Task

BASELINE = "none"  # the host alone: nothing is attached
METHODS = (BASELINE, "timely", "timely+apf", "timely+autofreeze", "apf", "autofreeze")
SCHEDULES = ("gpipe", "1f1b")

SENSITIVITY: dict[str, tuple[str, tuple[float, ...], tuple[str, ...]]] = {
    "r_max": ("max_freeze_ratio", (0.2, 0.4, 0.6, 0.8), ("timely",)),
    "T_APF": ("apf_threshold", (0.0003, 0.001, 0.003, 0.01), ("apf", "timely+apf")),
    "P_Auto": ("autofreeze_percentile", (20.0, 40.0, 60.0, 80.0), ("autofreeze", "timely+autofreeze")),
}
"""The paper's name of a setting, our name, the values to try, and the methods that it concerns."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run. ``settings`` go over the study's own: each set of them is a variant of its method, a row of its own."""

    task: str
    schedule: str
    method: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        """The method with the settings that differ from the study's."""
        return " ".join([self.method, *(f"{name}={value}" for name, value in sorted(self.settings.items()))])

    @property
    def group(self) -> tuple[str, str, str]:
        """Task, schedule and variant: equal for runs that differ in their seed only."""
        return self.task, self.schedule, self.variant

    def key(self) -> str:
        """The same text for the same run."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, record: Record) -> Cell:
        """The run that a line of the results is of."""
        return cls(**record["cell"])


def grid(
    tasks: Sequence[str], schedules: Sequence[str], methods: Sequence[str], seeds: int, settings: Mapping[str, Any]
) -> list[Cell]:
    """Every combination, seed by seed, so that a study that is cut off has something of everything."""
    return [
        Cell(task, schedule, method, seed, {} if method == BASELINE else settings)
        for seed, task, schedule, method in product(range(seeds), tasks, schedules, methods)
    ]


def sensitivity_grid(tasks: Sequence[str], schedules: Sequence[str], seeds: int) -> list[Cell]:
    """Each setting of SENSITIVITY alone, at each of its values, and the baselines to compare with."""
    found = []
    for seed, task, schedule in product(range(seeds), tasks, schedules):
        found.append(Cell(task, schedule, BASELINE, seed))
        for name, values, methods in SENSITIVITY.values():
            found.extend(Cell(task, schedule, m, seed, {name: value}) for m, value in product(methods, values))
    return found


def section(task: Task, cell: Cell, output_dir: str) -> dict[str, Any]:
    """The run's ``timely_freeze`` settings."""
    return {
        "method": cell.method,
        "max_freeze_ratio": 0.8,
        "warmup_steps": task.warmup,
        "monitoring_steps": task.monitoring,
        "progressive_steps": task.progressive,
        "stability_check_interval": task.check_every,
        "apf_threshold": task.apf_threshold,
        "seed": cell.seed,
        "on_error": "raise",
        "output_dir": output_dir,
        **cell.settings,
    }


def read_records(path: Path) -> list[Record]:
    """The finished runs. A last line that was cut off while it was written is no finished run."""
    return list(_whole_lines(path.read_text().splitlines())) if path.exists() else []


def _whole_lines(lines: Iterable[str]) -> Iterator[Record]:
    remaining = list(lines)
    for number, line in enumerate(remaining, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number < len(remaining):
                raise


def missing(cells: Sequence[Cell], records: Sequence[Record], tasks: Mapping[str, Task]) -> list[Cell]:
    """Cells that have no finished run of the same lengths yet."""
    done = {(Cell.of(record).key(), json.dumps(record["task"], sort_keys=True)) for record in records}
    return [cell for cell in cells if (cell.key(), json.dumps(asdict(tasks[cell.task]), sort_keys=True)) not in done]


def append(path: Path, record: Record) -> None:
    """Add one finished run, on a line of its own also where the last one was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = _partial_line(path) if path.exists() else ""
    if cut_off:
        path.write_text(path.read_text()[: -len(cut_off)])
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _partial_line(path: Path) -> str:
    """Return the text after the last line break; it is empty if every line is complete."""
    return path.read_text().rpartition("\n")[2]
