"""Number of monitoring steps until the saved time is known, compared with the paper's procedure run long.

On every host two trainings run in the same processes, step by step in turn. One is monitored as in the paper, for 40
steps with nothing frozen and 40 with everything frozen. The other trains while it is monitored, for 80 steps. The saved
share of a stage's backward, from the samples of some steps, is compared with the share from the paper's 80. On stage 0
the two have different masks. The paper's freeze 0.8 of it, where a frozen prefix sometimes saves input gradients too;
ours freeze every share from 0 to 0.8.

Two pipeline ranks on this machine's CPU, one thread each, 1F1B. Prints a table, and writes
results/hosts/monitoring.json.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import result_file, write_json
from benchmarks.shared.measuring import aligned, machine
from benchmarks.shared.trainings import HOSTS, RANKS, setup, start
from tf_adapters.measuring.freeze_response import StageTimes, measured_times
from tf_adapters.measuring.timer import ActionTimer, Clock, Sample
from tf_adapters.schedule.ir import Action
from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import PairedSettings, in_rotation

STEPS = 80
LENGTHS = (10, 20, 40, STEPS)
PROCEDURES = {
    "paper": {"monitoring": "halves"},
    "ours": {"monitoring": "mixed", "monitoring_precision": 1e-9},
}
PRECISION = 0.02


class Window(ActionTimer):
    """A timer with the samples of some consecutive steps of every kind."""

    def __init__(self, timer: ActionTimer, steps: slice) -> None:
        super().__init__(Clock())
        self._timer, self._steps_kept = timer, steps

    def samples(self, phase: str, action: Action) -> tuple[Sample, ...]:
        return self._timer.samples(phase, action)[self._steps_kept]

    def actions(self, phase: str) -> tuple[Action, ...]:
        return self._timer.actions(phase)


@dataclass(frozen=True)
class Fit:
    """A fit over some steps of one stage: the saved share of its unfrozen backward, and its claimed error."""

    saved: float
    error: float

    @classmethod
    def of(cls, times: StageTimes) -> Fit:
        (response,) = times.responses.values()
        return cls(response.value, response.error)


@dataclass(frozen=True)
class OfRank:
    """One rank's stage.

    Attributes:
        paper: what the paper's procedure says.
        ours: what mixed monitoring says, by the number of its steps; one fit for each window of that length.
        errors: what the first so many steps claim.
    """

    paper: Fit
    ours: dict[int, list[Fit]]
    errors: dict[int, float]

    def off(self, fits: Sequence[Fit]) -> list[float]:
        """How far fits are from the paper's, in shares of the unfrozen time."""
        return [fit.saved - self.paper.saved for fit in fits]


@dataclass(frozen=True)
class Row:
    """One stage and length. Everything is in shares of the unfrozen time.

    Attributes:
        steps: of mixed monitoring.
        paper: what freezing saves by the paper's procedure.
        off: from that, the root mean square over windows.
        claimed: median standard error.
        ended_after: steps after which monitoring of all stages would have ended by itself; None: later than it ran.
    """

    host: str
    stage: int
    steps: int
    paper: float
    off: float
    claimed: float
    ended_after: int | None

    def cells(self) -> list[str]:
        ended = str(self.ended_after) if self.ended_after else f"over {STEPS}"
        shares = (self.paper, self.off, self.claimed)
        return [self.host, str(self.stage), str(self.steps), *(f"{share:.1%}" for share in shares), ended]


HEADINGS = ["         host", "stage", "steps", "paper's", "off", "claimed", "ends after"]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    hosts = parser.parse_args().hosts
    rows: list[Row] = []
    print(*HEADINGS, sep="  ", flush=True)
    for host in hosts:
        with RankPool(RANKS, functools.partial(setup, host)) as ranks:
            of_host = rows_of(host, ranks.run(measure, host, timeout_s=1800))
        for row in of_host:
            print(aligned(row.cells(), HEADINGS))
        rows.extend(of_host)
    record = {"machine": machine(), "steps": STEPS, "precision": PRECISION, "rows": [asdict(r) for r in rows]}
    write_json(result_file("hosts/monitoring.json"), record)


def rows_of(host: str, ranks: Sequence[OfRank]) -> list[Row]:
    """The figures of each stage: one on a rank."""
    ends = [steps for steps in ranks[0].errors if max(rank.errors[steps] for rank in ranks) <= PRECISION]
    return [
        Row(
            host=host,
            stage=stage,
            steps=steps,
            paper=rank.paper.saved,
            off=root_mean_square(rank.off(rank.ours[steps])),
            claimed=statistics.median(fit.error for fit in rank.ours[steps]),
            ended_after=min(ends, default=None),
        )
        for stage, rank in enumerate(ranks)
        for steps in LENGTHS
    ]


def root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


# --- on the ranks --------------------------------------------------------------------------------------------


def measure(host: str) -> OfRank:
    """Monitor in both ways, in turn. Called on all ranks at once."""
    trainings = {
        name: start(
            host, PairedSettings(monitoring=STEPS, output_dir=f"runs/bench/monitoring/{host}", settings=settings)
        )
        for name, settings in PROCEDURES.items()
    }
    steps = {name: training.step for name, training in trainings.items()}
    for number in range(PairedSettings.warmup + STEPS):
        in_rotation(steps, number)
    timers = {name: training.adapter.controller.timer for name, training in trainings.items()}
    ours = timers["ours"]
    of_rank = OfRank(
        paper=Fit.of(measured_times(timers["paper"], first_stage=0)),
        ours={n: [fitted(ours, window) for window in windows(n)] for n in LENGTHS},
        errors={n: fitted(ours, slice(0, n // 2)).error for n in range(10, STEPS + 1, 2)},
    )
    for training in trainings.values():
        training.adapter.detach()
    return of_rank


def windows(steps: int) -> list[slice]:
    """One behind the other; half of their steps are of either kind."""
    half = steps // 2
    return [slice(first, first + half) for first in range(0, STEPS // 2 - half + 1, half)]


def fitted(timer: ActionTimer, steps: slice) -> Fit:
    return Fit.of(measured_times(Window(timer, steps), first_stage=0))


if __name__ == "__main__":
    main()
