"""A short soak: what `make soak` runs for 20,000 steps goes on to work. It judges no slope."""

from __future__ import annotations

import pytest
import soak

pytestmark = pytest.mark.programs


def test_a_run_is_planned_anew_saved_loaded_and_looked_at_beside_the_host_alone():
    row = soak.run("deepspeed", steps=480, looks_at=8)
    assert len(row["looks"]) == len(row["alone"]) == 8
    assert row["plans"] >= 2
    assert row["slopes"]["between"]["threads"]["mean"] >= 0
    assert all("error" in row["slopes"]["attached"][name] for name in soak.FIGURES)
