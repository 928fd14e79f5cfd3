"""Schedules by their usual names, and from torch's CSV files."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tf_adapters.errors import ConfigError, ScheduleError
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.schedule.orders import NAMES, named_schedule

SCHEDULES = {"1f1b" if name == "one_f_one_b" else name.replace("_", "-"): name for name in NAMES}
"""Names of ``schedule.orders`` by names on the command line."""

_ALIASES = {
    "one-f-one-b": "1f1b",
    "interleaved-1f1b": "interleaved",
    "zb-v": "zbv",
    "interleaved-zb": "interleaved-zero-bubble",
}
SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""

_MOST_CELLS = 100_000  # stages x microbatches; building and planning more takes many minutes
_MOVES = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a pipeline that the user gives. None leaves a size to the schedule."""

    microbatches: int | None = None
    ranks: int | None = None
    stages: int | None = None
    stages_per_rank: int | None = None


def canonical(name: str) -> str:
    """Return the name in ``SCHEDULES`` for a name or an alias of it. Raises ConfigError."""
    known = name.strip().lower().replace("_", "-")
    known = _ALIASES.get(known, known)
    if known not in SCHEDULES:
        raise ConfigError(f"--schedule {name!r}: allowed are {', '.join(SCHEDULES)}")
    return known


def named_order(name: str, sizes: Sizes) -> PipelineSchedule:
    """Return the order of actions of one of ``SCHEDULES``.

    Stages are counted over the whole pipeline, as in an action's text: ``stages = ranks * stages_per_rank``. Two of
    the three are enough. By default gpipe and 1f1b have one stage on each rank, and the others have two.
    Raises ConfigError that names the argument.
    """
    if sizes.microbatches is None:
        raise ConfigError("--microbatches: missing: how many microbatches make a batch")
    ranks, per_rank = _ranks(name, sizes)
    if ranks * per_rank * sizes.microbatches > _MOST_CELLS:
        raise ConfigError(
            f"--schedule {name}: {ranks * per_rank} stages x {sizes.microbatches} microbatches:"
            f" at most {_MOST_CELLS} of their products are simulated"
        )
    try:
        return named_schedule(SCHEDULES[name], ranks, sizes.microbatches, None if name in SINGLE else per_rank)
    except ScheduleError as error:
        raise ConfigError(f"--schedule {name}: {' '.join(str(error).split())}") from None


def _ranks(name: str, sizes: Sizes) -> tuple[int, int]:
    ranks, stages, per_rank = sizes.ranks, sizes.stages, sizes.stages_per_rank
    if ranks and stages and per_rank and stages != ranks * per_rank:
        raise ConfigError(
            f"--stages {stages}: --ranks {ranks} with --stages-per-rank {per_rank} are {ranks * per_rank}"
        )
    if ranks is None and stages is None:
        raise ConfigError("--stages: missing: how many stages the pipeline has (or --ranks: on how many ranks it runs)")
    if name in SINGLE:
        return ranks or stages or 1, 1
    if ranks is None:
        per_rank = per_rank or 2
        ranks = _divided(stages or 0, per_rank, f"--schedule {name} with {per_rank} stages on each rank")
    elif per_rank is None:
        per_rank = _divided(stages, ranks, f"--schedule {name} on --ranks {ranks}") if stages else 2
        # The model may be given in one piece per rank; a schedule that wants two stages cuts each in two.
        per_rank = 2 if per_rank == 1 else per_rank
    return ranks, per_rank


def _divided(stages: int, by: int, what: str) -> int:
    if stages % by:
        raise ConfigError(f"--stages {stages}: {what} needs a multiple of {by}")
    return stages // by


def read_csv(path: str) -> PipelineSchedule:
    """Read a schedule in torch.distributed.pipelining's CSV format: a line per rank, a cell per action.

    Empty cells, and cells that move tensors, shard parameters or reduce gradients, are left out. An overlapped forward
    and backward, ``(0F1;3B0)OVERLAP_F_B``, becomes two actions. Raises ConfigError.
    """
    try:
        lines = list(csv.reader(Path(path).read_text(encoding="utf-8").splitlines()))
    except OSError as error:
        raise ConfigError(f"--csv {path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"--csv {path}: not a CSV file of text ({error})") from None
    ranks = [
        tuple(action for number, cell in enumerate(cells, start=1) for action in _actions(cell, path, line, number))
        for line, cells in enumerate(lines, start=1)
    ]
    try:
        return PipelineSchedule(tuple(ranks)).validate()
    except ScheduleError as error:
        raise ConfigError(f"--csv {path}: {error}") from None


def _actions(cell: str, path: str, line: int, number: int) -> Iterator[Action]:
    text = cell.strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    for part in overlapped[1].split(";") if overlapped else [text]:
        if not part.strip() or _MOVES.fullmatch(part.strip()):
            continue
        try:
            yield Action.parse(part.strip())
        except ScheduleError as error:
            raise ConfigError(f"--csv {path}: line {line}, cell {number}: {error}") from None
