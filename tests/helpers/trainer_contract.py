"""What every trainer with a way in of its own keeps to: on its own loop, in real trainings on two ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from forked_jobs import Told, outcomes_of

from tf_adapters.report import Report


class TrainerContract:
    """A trainer's test class extends it; its module of jobs has those that are named here.

    "alone", without us; "nothing frozen"; "whole", in the folder ``run``, saved on the way; "resumed" from there;
    "wrong setting". All others succeed, but those of ``refused``.
    """

    module: ClassVar[str]
    refused: ClassVar[tuple[str, ...]] = ()
    steps: ClassVar[range] = range(1, 13)  # as the trainer counts them
    resumed: ClassVar[range] = range(9, 13)
    prefix: ClassVar[str] = "timely_freeze/"  # of our figures in its logs
    report: ClassVar[str] = "run/timely_freeze/report.json"

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp(cls.module)

    @pytest.fixture(scope="class")
    @classmethod
    def jobs(cls, folder: Path) -> dict[str, list[Told]]:
        outcomes = outcomes_of(cls.module, folder)
        failed = {name for name, ranks in outcomes.items() if any(told.error for told in ranks)}
        expected = {"wrong setting", *cls.refused}
        assert failed == expected, [outcomes[name][rank].said[-3000:] for name in failed ^ expected for rank in (0, 1)]
        return outcomes

    def test_with_nothing_frozen_it_is_the_trainer_alone_to_the_bit(self, jobs: dict[str, list[Told]]) -> None:
        for ours, alone in zip(jobs["nothing frozen"], jobs["alone"], strict=True):
            assert ours.losses == alone.losses
            assert ours.parameters == alone.parameters != ""
        assert list(jobs["alone"][1].losses) == list(self.steps)

    def test_it_freezes_to_the_end_and_leaves_a_report(self, jobs: dict[str, list[Told]], folder: Path) -> None:
        report = Report.read(folder / self.report)
        assert report.status == "stable"
        assert report.plan is not None
        assert any(any(shares) for shares in report.frozen_share.values())
        whole, alone = jobs["whole"][1].losses, jobs["alone"][1].losses
        assert whole[self.steps[0]] == alone[self.steps[0]]
        assert whole[self.steps[-1]] != alone[self.steps[-1]]

    def test_the_trainer_logs_its_figures(self, jobs: dict[str, list[Told]]) -> None:
        figures = jobs["whole"][1].figures[self.steps[-1]]
        assert 0.0 <= figures[f"{self.prefix}afr_stage_0"] <= 1.0
        assert figures[f"{self.prefix}planned_step_ms"] > 0.0

    def test_a_resumed_run_repeats_the_uninterrupted_one(self, jobs: dict[str, list[Told]]) -> None:
        whole, resumed = jobs["whole"], jobs["resumed"]
        assert resumed[1].losses == {step: whole[1].losses[step] for step in self.resumed}
        assert [told.parameters for told in resumed] == [told.parameters for told in whole]
        assert any("resumed after step" in line for line in resumed[0].lines)
        assert not any("measured" in line for line in resumed[0].lines)  # no plan is made again

    def test_a_wrong_setting_is_one_line_on_all_ranks(self, jobs: dict[str, list[Told]]) -> None:
        errors = [told.error for told in jobs["wrong setting"]]
        assert errors[0] == errors[1]
        assert "\n" not in errors[0]
        assert any("max_freeze_ratio is 6: allowed is" in line for line in jobs["wrong setting"][0].said.splitlines())
