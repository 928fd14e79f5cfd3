"""How to freeze the first stage, by the planner alone: `python benchmarks/first_stage.py`, seconds.

The first stage passes no input gradient on, so what is frozen there from its first layer on saves twice. Three ways to
use that, for a pipeline of equal stages, forwards of 1 and backwards of 2 of which half is weight gradients:

partial: uniform masks; only what the plan happens to freeze whole disappears (the paper's selection).
whole: the plan may count on the last backward's disappearing (`first_stage: "whole"`).
drawn: in each step chance chooses, with the plan's ratio r, microbatches with a prefix of the stage frozen. At chance
r the prefix is the whole stage, and all parameters have equal chances; at 0.8 it is r / 0.8 of the stage, whose
first layers are then frozen that often, and whose last ones never.

Ends of the batch are over the unfrozen end, for drawn prefixes the mean over 400 steps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from measuring import aligned

from tf_adapters.planner.forecast import planned_makespan
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.planner.solve import plan
from tf_adapters.schedule.dag import PipelineDag
from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.simulate.orders import Sizes, named_order

FORWARD, BACKWARD, WEIGHTS = 1.0, 2.0, 1.0
MICROBATCHES, STEPS, R_MAX = 8, 400, 0.8
LATER = 1.1
SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Row:
    """End of the batch over the unfrozen one, and the mean freeze ratio in [0, 1], of each way.

    ``..._later``: the freeze ratio for an end that is LATER times the earliest of partial masks.
    ``whole_freezes_for_drawn``: what ``whole`` freezes for the end of ``drawn_most``.
    """

    schedule: str
    stages: int
    partial: float
    partial_freezes: float
    whole: float
    whole_freezes: float
    partial_freezes_later: float
    whole_freezes_later: float
    drawn_equal: float
    drawn_most: float
    drawn_freezes: float
    whole_freezes_for_drawn: float


def main() -> None:
    rows = [study(name, stages) for name in SCHEDULES for stages in (2, 4, 8)]
    headings = [
        "schedule", "stages", "partial", "freezes", "whole", "freezes", "partial, later", "whole, later",
        "drawn at r", "drawn at 0.8", "freezes",
        "whole for that end",
    ]  # fmt: skip
    print(*headings, sep="  ")
    for row in rows:
        cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in asdict(row).values()]
        print(aligned(cells, headings))
    target = Path(__file__).with_name("results") / "first_stage.json"
    target.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def study(name: str, stages: int) -> Row:
    schedule = named_order(name, Sizes(MICROBATCHES, stages))
    partial, whole = (plan(schedule, times(schedule), R_MAX, first_stage_vanishes=known) for known in (False, True))
    drawn = plan(schedule, times(schedule, first_stage_lower=0.0), R_MAX)
    unfrozen = partial.makespan_ms.unfrozen
    drawn_most = mean_end(schedule, drawn, least_chance=R_MAX)
    earliest = planned_makespan(schedule, partial)

    def freezes(by: float, vanishes: bool) -> float:
        least = plan(schedule, times(schedule), R_MAX, target_makespan_ms=by, first_stage_vanishes=vanishes)
        return least.mean_freeze_ratio

    return Row(
        schedule=name,
        stages=stages,
        partial=earliest / unfrozen,
        partial_freezes=partial.mean_freeze_ratio,
        whole=whole.makespan_ms.planned / unfrozen,
        whole_freezes=whole.mean_freeze_ratio,
        partial_freezes_later=freezes(LATER * earliest, vanishes=False),
        whole_freezes_later=freezes(LATER * earliest, vanishes=True),
        drawn_equal=mean_end(schedule, drawn, least_chance=0.0) / unfrozen,
        drawn_most=drawn_most / unfrozen,
        drawn_freezes=drawn.mean_freeze_ratio,
        whole_freezes_for_drawn=freezes(drawn_most, vanishes=True),
    )


def times(schedule: PipelineSchedule, first_stage_lower: float = BACKWARD - WEIGHTS) -> dict[Action, Bounds]:
    lower = {0: first_stage_lower}
    return {
        action: Bounds(lower.get(action.stage, BACKWARD - WEIGHTS), BACKWARD)
        if action.freezable
        else Bounds(FORWARD, FORWARD)
        for action in schedule.actions
    }


def mean_end(schedule: PipelineSchedule, planned: FreezePlan, least_chance: float) -> float:
    """Mean end of the batch where chance decides in which microbatches a prefix of the first stage is frozen.

    Systematic sampling: of each run of microbatches as many are drawn as their chances say, up to one.
    """
    rng, dag = np.random.default_rng(0), PipelineDag.from_schedule(schedule)
    first = [action for action in schedule.actions if action.stage == 0 and action.freezable]
    ratios = np.array([planned.freeze_ratio[action] for action in first])
    chances = np.where(ratios > 0.0, np.maximum(ratios, least_chance), 0.0)
    frozen = BACKWARD * (1.0 - ratios / np.maximum(chances, 1e-9))
    ends = []
    for _ in range(STEPS):
        edges = np.floor(np.concatenate([[0.0], np.cumsum(chances)]) + rng.random())
        drawn = np.where(np.diff(edges) > 0, frozen, BACKWARD)
        ends.append(dag.makespan({**planned.duration_ms, **dict(zip(first, drawn.tolist(), strict=True))}))
    return float(np.mean(ends))


if __name__ == "__main__":
    main()
