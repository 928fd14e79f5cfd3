"""A few hundred cases of bad input in each run, the same each time; ``make fuzz`` runs 10,000 new ones."""

from __future__ import annotations

from pathlib import Path

import fuzzing
import pytest
from hypothesis import settings


def test_bad_input_ends_with_success_or_one_line(tmp_path: Path) -> None:
    ran, failures = fuzzing.fuzz(300, seed=1, folder=tmp_path)
    assert not failures, "\n".join(failures)
    assert set(ran) == set(fuzzing.CASES)
    assert fuzzing.ANSWERS["refused"] > 50
    assert fuzzing.ANSWERS["success"] > 20


def test_property_tests_draw_the_same_examples_in_every_run(request: pytest.FixtureRequest) -> None:
    assert settings.default.derandomize
    own = {
        item.nodeid: item.obj._hypothesis_internal_use_settings for item in request.session.items if is_property(item)
    }
    for name, chosen in {**own, "default": settings.default}.items():
        assert (chosen.derandomize, chosen.deadline, chosen.database) == (True, None, None), name


def is_property(item: pytest.Item) -> bool:
    return item.get_closest_marker("hypothesis") is not None
