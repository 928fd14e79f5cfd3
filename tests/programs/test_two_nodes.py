"""Two nodes with networks and clocks of their own: hosts train, freeze and resume on them, and links are timed."""

from __future__ import annotations

from pathlib import Path

import hosts
import pytest
from jobs import Tell, start
from node_links import Edges, timed_run, way_ms
from two_nodes import Node, node_folder

from tf_adapters.measuring import transfers
from tf_adapters.measuring.transfers import measure_gaps
from tf_adapters.report import Report

pytestmark = pytest.mark.programs

Nodes = tuple[Node, Node]
HOSTS = [name for name in hosts.HOSTS if name != "deepspeed gpipe"]
SECTION = {
    "max_freeze_ratio": 0.8,
    "warmup_steps": 1,
    "monitoring_steps": 4,
    "progressive_steps": 2,
    "replan_interval": 1,
    "replan_threshold": 0.0,
}
SAVED_AT, STEPS = 17, 20  # the report says "stable" from the tenth stable step on


# --- a run, and another that goes on -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_a_run_freezes_and_goes_on_in_new_processes(host: str, nodes: Nodes, tmp_path: Path) -> None:
    """One stage on each node. Only rank 0's node has the report; the second job has the first one's losses.

    The checkpoint is in a folder that both nodes see, as DeepSpeed wants it.
    """
    told = []
    for resume in (False, True):
        with start(train, host, tmp_path, str(tmp_path / "shared"), resume, nodes=nodes) as job:
            assert job.ended() == [0, 0], job.output(0) + job.output(1)
            told.append([job.events(rank)[-1] for rank in range(2)])
        assert not nodes[0].processes() + nodes[1].processes()
    for before, after in zip(*told, strict=True):
        assert before["failure"] is after["failure"] is None
        assert before["phases"] == ["warmup", "monitoring_upper", "monitoring_mixed", "progressive", "stable"]
        assert after["phases"] == ["stable"]
        assert before["frozen"] == after["frozen"] == told[0][0]["frozen"] != []
        assert after["losses"] == before["losses"]
    assert any(event["losses"][0] for event in told[0])
    report = Report.read(node_folder(tmp_path, 0) / "out" / "timely_freeze" / "report.json")
    assert report.status == "stable"
    assert {sample.action[0] for sample in report.measured.backward_ms} == {"0", "1"}
    assert not list(node_folder(tmp_path, 1).rglob("report.json"))


def train(tell: Tell, host: str, saved: str, resume: bool) -> None:
    """Train to ``STEPS``, from the beginning or from what was saved; tell what the last steps were like."""
    training = hosts.start(host, SECTION, output_dir="out")
    if resume:
        training.load(saved)
    controller = training.controller
    phases, losses = [], []
    for number in range(SAVED_AT if resume else 0, STEPS):
        if number == SAVED_AT and not resume:
            training.save(saved)
        phases.append(controller.phase.value)
        losses.append(training.step(number))
    frozen = [controller.frozen_parameters(STEPS, 0, microbatch) for microbatch in range(hosts.MICROBATCHES)]
    failure = controller.state.failure
    training.detach()
    tell(phases=list(dict.fromkeys(phases)), losses=losses[-STEPS + SAVED_AT :], frozen=frozen, failure=failure)


# --- transfers between clocks --------------------------------------------------------------------------------------


def test_transfers_are_those_of_the_links_although_clocks_and_starts_differ(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the alignment of clocks they would be far off. ``faults/fault_nodes.py`` has how near they come."""
    run = timed_run(nodes, tmp_path)
    assert set(run.transfers) == set(run.schedule.transfers())
    monkeypatch.setattr(transfers, "_clocks", lambda *_: dict.fromkeys(range(4), 0.0))
    unaligned = measure_gaps(run.schedule, run.steps).communication
    assert away_between_nodes(run.transfers) < away_between_nodes(unaligned)


def away_between_nodes(found: Edges) -> float:
    """How far transfers between the nodes are from what their link takes, ms, all together."""
    return sum(abs(ms - way_ms(1, 2)) for (s, t), ms in found.items() if {s.stage, t.stage} == {1, 2})
