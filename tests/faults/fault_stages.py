"""Random small stages: gradients are the host's or the oracle's, whatever users' code does in its forward."""

from __future__ import annotations

from random_stages import judge_all
from stage_cases import draw_case

SEEDS = 40


def fault_random_stages_train_as_the_host_and_the_oracle_say() -> None:
    results = list(judge_all([draw_case(number) for number in range(SEEDS)]))
    assert not [str(result) for result in results if result.wrong]
    assert sum(bool(result.skipped or result.refused) for result in results) < SEEDS // 4
