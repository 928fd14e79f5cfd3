"""Where weight gradients that wait are computed among the engine's own instructions, with shapes that may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deepspeed_ranks import Case, batch, build_engine

from tf_adapters.testing import force_plan

pytestmark = pytest.mark.distributed
WAITING = Case(
    stages=4,
    dynamic_shape=True,
    config={"gradient_accumulation_steps": 8},
    section={"weight_gradients": "deferred"},
    ratios=0.0,
)


@pytest.fixture(scope="module")
def instructions(pools: Any) -> list[list[str]]:
    """What each rank ran in one batch, by name; "W" is the weight gradients of one microbatch."""
    return list(pools(4).run(recorded, WAITING))


def test_what_a_backward_computed_is_sent_before_any_weight_gradient(instructions: list[list[str]]) -> None:
    for names in instructions[1:]:
        sends = [next(n for n in names[at + 1 :] if n in ("W", "SendGrad")) for at in positions(names, "BackwardPass")]
        assert sends == ["SendGrad"] * 8


def test_weight_gradients_are_computed_where_the_rank_would_wait(instructions: list[list[str]]) -> None:
    for stage, names in enumerate(instructions):
        waits = {"RecvActivation", "RecvGrad", "ReduceTiedGrads"} | ({"ForwardPass"} if stage == 0 else set())
        waits |= {"BackwardPass"} if stage == 3 else set()
        assert {names[at + 1] for at in positions(names, "W")} <= {"W", *waits}
        assert "W" not in names[names.index("ReduceTiedGrads") :]
    assert [names.count("W") for names in instructions] == [0, 8, 8, 8]


def positions(names: list[str], name: str) -> list[int]:
    return [at for at, given in enumerate(names) if given == name]


def recorded(case: Case) -> list[str]:
    import tf_adapters.deepspeed

    names: list[str] = []

    def recording(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def instruction(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return run(*args, **kwargs)

        return instruction

    with pytest.MonkeyPatch.context() as patch:
        engine = build_engine(case)
        adapter = tf_adapters.deepspeed.attach(engine)
        assert adapter is not None
        for kind, run in adapter._host_instructions.items():  # before attaching, other instructions are refused
            runs_ours = engine._INSTRUCTION_MAP[kind] is not run
            table = adapter._host_instructions if runs_ours else engine._INSTRUCTION_MAP
            patch.setitem(table, kind, recording(kind.__name__, run))
        controller = adapter.controller
        force_plan(controller, case.ratios)
        patch.setattr(controller, "compute_weight_gradients", recording("W", controller.compute_weight_gradients))
        for step in range(2):  # the engine exchanges shapes in the first one
            names.clear()
            engine.train_batch(iter(batch(step, 0, case.microbatches)))
        assert controller.execution is not controller.schedule
    return names
