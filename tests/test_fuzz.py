"""A few hundred cases of bad input in each run; ``make fuzz`` runs 10,000."""

from __future__ import annotations

from pathlib import Path

import fuzzing


def test_bad_input_ends_with_success_or_one_line(tmp_path: Path) -> None:
    ran, failures = fuzzing.fuzz(300, seed=1, folder=tmp_path)
    assert not failures, "\n".join(failures)
    assert set(ran) == set(fuzzing.CASES)
    assert fuzzing.ANSWERS["refused"] > 50
    assert fuzzing.ANSWERS["success"] > 20
