"""What the deprecation policy of docs/compatibility.md promises, held with files that earlier versions wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from schedules import one_f_one_b

from tf_adapters.cli import main
from tf_adapters.cli.doctor import HOSTS, TRAINERS
from tf_adapters.config import REMOVED, TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.report import Report
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training.state import FORMAT, compatible_state

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data"
REPORTS = sorted(DATA.glob("report_format_*.json"))
CONFIG = TimelyFreezeConfig(goal="paper", warmup_steps=5, monitoring_steps=10, progressive_steps=20)


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DATA / name).read_text())
    return data


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_of_every_format_is_shown_and_simulated(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Report.read(path).plan is not None
    assert main(["show", str(path)]) == 0
    assert main(["simulate", str(path), "--sweep", "none"]) == 0
    assert "deepspeed" in capsys.readouterr().out


def test_a_report_of_a_run_with_a_removed_setting_is_shown_and_simulated(tmp_path: Path) -> None:
    data, path = load("report_format_1.json"), tmp_path / "report.json"
    settings = {**data["config"], "weight_gradients": "deferred", **dict.fromkeys(REMOVED, "post_validated")}
    path.write_text(json.dumps({**data, "config": settings}))
    assert main(["show", str(path)]) == 0
    assert main(["simulate", str(path), "--sweep", "none"]) == 0


def test_a_report_of_a_newer_format_is_refused_with_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^format 99 is newer than this version reads \(1\): update tf-adapters$"):
        Report.from_json({**load("report_format_1.json"), "format": 99})


def test_a_state_of_an_older_format_keeps_its_step_and_is_monitored_anew() -> None:
    data = load("state_format_1.json")
    assert data["format"] == 1 < FORMAT
    masks = StageMasks({stage: [FreezeUnit((f"{stage}.weight",), 4.0, (2, 2))] for stage in (0, 1)}, seed=0)
    state = compatible_state(data, CONFIG, one_f_one_b(2, 2), masks, 3)
    assert state.completed_steps == data["completed_steps"]
    assert state.plan is None
    assert state.phases.warmup_end == data["completed_steps"]
    assert "of format 1, this version reads 2 and 3" in state.notes[-1]


def test_a_state_of_format_2_goes_on_with_its_plans_and_times() -> None:
    """Of a run with two numbers of microbatches, sampled tokens and a ``max_freeze_ratio`` "auto" of that version."""
    data, schedule = load("state_format_2.json"), one_f_one_b(2, 3)
    masks = StageMasks({stage: [FreezeUnit((f"{stage}.weight",), 4.0, (2, 2))] for stage in (0, 1)}, seed=0)
    state = compatible_state(data, CONFIG, schedule, masks, 3)
    assert (state.completed_steps, state.measured_at, state.notes) == (40, 15, ("1B0: a note",))
    known, facts = state.measurement, state.measurement.to_json()
    assert (known.schedule, facts["times"], facts["communication"]) == (
        schedule,
        data["bounds"],
        data["gaps"]["communication"],
    )
    assert (known.unfrozen_step_ms, known.other_ms) == (12.3456789012345, 1.25)
    assert known.batch_times is not None
    assert [known.token_costs[stage].fixed for stage in (0, 1)] == [0.05, 0.1]
    assert {number: batch.steps for number, batch in state.plans.of.items()} == {4: 0, 3: 1}
    assert state.plans.of[3].plan.to_json()["freeze_ratio"] == data["plan"]["freeze_ratio"]
    assert state.measured_for(one_f_one_b(2, 4)).unfrozen_step_ms == 19.25
    saved = json.loads(json.dumps(state.to_json(CONFIG, masks)))
    assert compatible_state(saved, CONFIG, schedule, masks, 3) == state
    single = {name: value for name, value in data.items() if name not in ("batches", "other_ms", "checksum")}
    earliest = compatible_state(single, CONFIG, schedule, masks, 3)
    assert earliest.plans.of[3].plan == state.plans.of[3].plan
    assert earliest.measurement.other_ms == max(0.0, known.unfrozen_step_ms - known.span_ms)


def test_a_report_of_a_goal_that_was_taken_out_is_shown(tmp_path: Path) -> None:
    data = load("report_format_1.json")
    data["config"] |= {"goal": "pays", "max_freeze_ratio": "auto"}
    data["gradient_signal"] = {"0": [0.2, 0.05]}
    data["plan"]["frontier"] = [{"makespan_ms": 80.0, "added_noise": {"0": None}, "chosen": True}]
    assert Report.from_json(data).max_freeze_ratio is None
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert main(["show", str(tmp_path / "report.json")]) == 0


def test_the_table_of_hosts_is_what_doctor_compares_with() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"^\| ([\w. -]+) \| `([\w-]+)` \| ([\d.]+) \| .* \| (\d+) \| \d+ \|$", page, re.MULTILINE)
    ran = {(name, package, version) for name, package, version, _ in rows}
    for host in (*HOSTS, *TRAINERS):
        assert {(host.name, host.package, host.oldest), (host.name, host.package, host.newest)} <= ran
    assert {failed for *_, failed in rows} == {"0"}
