"""slime's own training with Megatron and freezing, on two ranks over gloo, from a checkout; see ``slime_jobs``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked_jobs import Told
from trainer_contract import TrainerContract


@pytest.mark.skipif(
    not {"SLIME_SOURCE", "MEGATRON_LM_SOURCE"} <= os.environ.keys(),
    reason="SLIME_SOURCE and MEGATRON_LM_SOURCE name no checkouts of slime and Megatron-LM",
)
@pytest.mark.programs
class TestSlime(TrainerContract):
    module = "slime_jobs"
    steps, resumed = range(12), range(9, 12)
    prefix = "train/timely_freeze_"

    def test_a_critic_reports_in_a_folder_of_its_own(self, jobs: dict[str, list[Told]], folder: Path) -> None:
        assert (folder / "critic" / "critic" / "timely_freeze" / "report.json").exists()
        assert any(name.startswith("train/critic-timely_freeze") for name in jobs["critic"][1].figures[2])

    def test_detaching_gives_slime_back_as_it_was(self, jobs: dict[str, list[Told]]) -> None:
        assert all(told.more["restored"] for ranks in jobs.values() for told in ranks)
