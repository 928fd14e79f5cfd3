"""Every run leaves a report that says what happened, and its result in the log."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import one_rank
import pytest
from one_rank import HOST, train
from schedules import gpipe

from tf_adapters.collectives import Collectives
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.hosts.agreement import agree_on_settings
from tf_adapters.report import Report
from tf_adapters.report.observer import RunReporter
from tf_adapters.testing.ranks import HANG_S
from tf_adapters.training import plan_maker
from tf_adapters.training.freeze_ratios import FreezeRatios

controller_of = partial(one_rank.controller_of, gpipe(1, 4), monitoring="halves")


def report_of(folder: Path) -> Report:
    return Report.read(folder / "timely_freeze" / "report.json")


def test_a_run_that_ends_before_it_has_a_plan_leaves_a_report(tmp_path: Path) -> None:
    controller = controller_of(tmp_path)
    train(controller, 3)
    controller.close()
    report = report_of(tmp_path)
    assert (report.status, report.step, report.plan) == ("monitoring", 3, None)


ENDS = {
    0: "ended in the warm-up after 0 of 1 steps: nothing was measured",
    3: "ended in monitoring after 2 of 4 steps: no plan was made",
    5: "ended in planning: the plan was made, and no step has followed it",
    6: "ended in progressive freezing: the whole plan starts after step 7",
    8: "stable freezing: ",
}


@pytest.mark.parametrize("steps", ENDS)
def test_a_run_ends_with_its_phase_and_the_next_command(
    steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    controller = controller_of(tmp_path / "a run")
    train(controller, steps)
    caplog.clear()
    controller.close()
    phase, command = (record.getMessage().removeprefix("timely_freeze: ") for record in caplog.records)
    assert phase.startswith(ENDS[steps])
    assert command == f"the report is written; next: tf-adapters show '{controller.report_path}'"


def test_a_run_that_failed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the solver broke")

    monkeypatch.setattr(plan_maker, "solve", broken)
    train(controller_of(tmp_path), 6)
    report = report_of(tmp_path)
    assert report.status == "failed"
    assert "the solver broke" in report.note[-1]


def accept(_: TimelyFreezeConfig) -> None:
    """A host that runs all settings."""


def test_disabled_is_in_the_report(tmp_path: Path) -> None:
    config = TimelyFreezeConfig(enabled=False, output_dir=str(tmp_path))
    assert agree_on_settings(Collectives(), HOST, lambda: config, accept) is None
    report = report_of(tmp_path)
    assert (report.status, report.note) == ("disabled", ('"enabled" is false',))


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    config = TimelyFreezeConfig(output_dir=str(file))
    with pytest.raises(ConfigError, match=r"timely_freeze\.output_dir is .*file.*allowed is a folder"):
        agree_on_settings(Collectives(), HOST, lambda: config, accept)


def test_the_result_is_logged_once_in_stable_freezing_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    controller = controller_of(tmp_path)
    train(controller, 20)
    assert caplog.text.count("stable freezing: ") == 1
    train(controller, 5)
    controller.close()
    lines = [record.getMessage() for record in caplog.records if "stable freezing: " in record.getMessage()]
    assert len(lines) == 2
    assert "ms a step over 16 steps" in lines[-1]
    assert "planned" in lines[-1]
    assert report_of(tmp_path).step == 25


def ended(folder: Path, code: str) -> str:
    """What a process says that trains with controllers of this module and ends."""
    before = f"""
    import sys
    sys.path[:0] = {sys.path!r}
    from pathlib import Path
    from {__name__} import controller_of, train
    folder = Path({str(folder)!r})
    """
    command = [sys.executable, "-c", textwrap.dedent(before) + code]
    process = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert process.returncode == 0, process.stderr
    return process.stderr


def test_a_process_that_ends_without_closing_leaves_the_last_step(tmp_path: Path) -> None:
    said = ended(tmp_path, "train(controller_of(folder), 23)")
    report = report_of(tmp_path)
    assert (report.status, report.step) == ("stable", 23)
    *_, result, command = said.rstrip().splitlines()
    assert "stable freezing: " in result
    assert command.endswith(f"next: tf-adapters show {tmp_path / 'timely_freeze' / 'report.json'}")


@pytest.mark.parametrize("end", ["", "; second.close()"])
def test_a_run_that_failed_leaves_the_report_to_the_one_that_the_process_began_after_it(
    tmp_path: Path, end: str
) -> None:
    ended(tmp_path, f"train(controller_of(folder), 23); second = controller_of(folder); train(second, 3){end}")
    assert (report_of(tmp_path).status, report_of(tmp_path).step) == ("monitoring", 3)


def test_a_run_that_began_no_step_leaves_the_report_to_the_one_before_it(tmp_path: Path) -> None:
    ended(tmp_path, "train(controller_of(folder), 23); controller_of(folder)")
    assert report_of(tmp_path).step == 23


def test_a_report_has_what_the_masks_really_froze(tmp_path: Path) -> None:
    controller = controller_of(tmp_path)
    shares = train(controller, 30)
    controller.close()
    report = report_of(tmp_path)
    assert report.frozen_share["0"] == pytest.approx(shares)
    ratios = report.parameter_freeze_ratio["0"]
    assert set(ratios) == {f"{name}.w" for name in "abcd"}
    assert sum(ratios.values()) / 4 == pytest.approx(sum(shares[7:]) / len(shares[7:]))


def test_method_none_plans_from_masked_monitoring_and_then_freezes_nothing(tmp_path: Path) -> None:
    controller = controller_of(tmp_path, method="none")
    shares = train(controller, 15)
    controller.close()
    assert max(shares[:5]) > 0.5
    assert set(shares[5:]) == {0.0}
    report = report_of(tmp_path)
    assert report.plan is not None
    assert report.plan.mean_freeze_ratio > 0.0
    assert report.plan.makespan_ms.planned < report.plan.makespan_ms.unfrozen


def test_method_none_without_masks_never_freezes(tmp_path: Path) -> None:
    controller = controller_of(tmp_path, method="none", max_freeze_ratio=0.0)
    assert set(train(controller, 15)) == {0.0}
    controller.close()
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["measured"]["step_ms_unfrozen"] > 0.0


# --- what it costs the training ------------------------------------------------------------------------------


def test_masks_are_drawn_before_the_first_action_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two actions a draw would leave a device without anything to do."""
    controller = controller_of(tmp_path)
    train(controller, 8)
    events: list[str] = []
    draw = FreezeRatios.masks
    monkeypatch.setattr(FreezeRatios, "masks", lambda *args: events.append("draw") or draw(*args))
    controller.begin_step()
    assert events == ["draw"] * len(controller.parameter_masks)
    for action in controller.schedule.ranks[0]:
        with controller.running(action):
            controller.mask(action.stage, action.microbatch)
    controller.held_parameters()
    controller.end_step()
    assert events == ["draw"] * len(controller.parameter_masks)


class Sink:
    """Wants the figures of every third step."""

    def __init__(self) -> None:
        self.asked = 0
        self.taken: list[Mapping[str, float]] = []

    def due(self) -> bool:
        self.asked += 1
        return self.asked % 3 == 0

    def __call__(self, figures: Mapping[str, float]) -> None:
        self.taken.append(figures)


def test_figures_are_made_only_for_steps_that_they_are_wanted_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink()
    controller = controller_of(tmp_path)
    assert isinstance(controller._observer, RunReporter)
    controller._observer._metrics = sink
    train(controller, 7)
    assert (sink.asked, len(sink.taken)) == (7, 2)
    assert all("afr_stage_0" in figures for figures in sink.taken)


def test_a_metrics_function_that_fails_is_said_once_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def broken(figures: Mapping[str, float]) -> None:
        asked.append(figures)
        raise OSError("no space\nleft")

    controller = controller_of(tmp_path)
    assert isinstance(controller._observer, RunReporter)
    controller._observer._metrics = broken
    train(controller, 12)
    assert len(asked) == 12
    assert caplog.text.count("the metrics function failed") == 1
    assert "the metrics function failed on rank 0: OSError: no space left; training goes on" in caplog.text
    assert controller.state.failure is None


@pytest.mark.parametrize("method", ["timely", "apf", "autofreeze", "timely+apf", "timely+autofreeze", "none"])
def test_figures_are_of_the_step_that_ran(method: str, tmp_path: Path) -> None:
    """Stability checks, plans and phases change at the end of a step what the next one freezes."""
    controller = controller_of(tmp_path, method=method, stability_check_interval=2)
    assert isinstance(controller._observer, RunReporter)
    figures: list[Mapping[str, float]] = []
    controller._observer._metrics = figures.append
    shares, planned = [], []
    for _ in range(20):
        planned.append(controller.forecast.planned_ms if controller.forecast else None)
        shares += train(controller, 1)
    assert [of_step["afr_stage_0"] for of_step in figures] == shares
    assert [of_step["step_ms"] for of_step in figures] == pytest.approx([16.0 - 4.0 * share for share in shares])
    assert [of_step.get("planned_step_ms") for of_step in figures] == planned
    assert len({*shares}) > 1  # something was to be seen


class Recorded(Collectives):
    """Two ranks, this the one of the given number, of which the other does the same; it records what is called."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[str] = []

    def gather(self, value: Any) -> list[Any]:
        self.calls.append("gather")
        return [value, value]

    def collect(self, value: Any) -> list[Any] | None:
        self.calls.append("collect")
        return [value, value] if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        self.calls.append("broadcast")
        return value


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_rank_0_to_write_the_report(
    rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = controller_of(tmp_path)
    train(controller, 3)
    collectives = Recorded(rank)
    reporter = RunReporter(collectives)
    reporter.report(controller.view())
    assert collectives.calls == ["collect"]

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Report, "write", full)
    reporter.report(controller.view())
    reporter.report(controller.view())
    said = [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]
    text = "timely_freeze: the report could not be written: No space left on device"
    assert said == ([text] if rank == 0 else [])
    assert collectives.calls == ["collect"] * 3
    reporter.close(controller.view())


def test_a_step_that_a_graph_captures_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be replayed with one mask for ever."""
    controller = controller_of(tmp_path)
    train(controller, 1)
    monkeypatch.setattr("tf_adapters.training.controller.is_capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match="a CUDA graph captures this step"):
        controller.begin_step()
