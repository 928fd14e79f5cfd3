"""Two nodes with networks and clocks of their own: hosts train, freeze and resume on them, and links are timed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hosts
import pytest
from jobs import Tell, start
from torch_ranks import Case, build
from two_nodes import EXAMPLE, TINY, Node, freezing, node_folder, torchrun_on

from tf_adapters.report import Report
from tf_adapters.schedule.ir import Action, PipelineSchedule
from tf_adapters.testing.emulated_link import EmulatedLinks, Link
from tf_adapters.timing import transfers
from tf_adapters.timing.phase import Phase
from tf_adapters.timing.timer import Interval, Trace
from tf_adapters.timing.transfers import Gaps, complete_steps, measure_gaps

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

Nodes = tuple[Node, Node]
HOSTS = [name for name in hosts.HOSTS if name != "deepspeed gpipe"]
SECTION = {"warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2, "report_every": 1}
SAVED_AT, STEPS = 17, 20  # the report says "stable" from the tenth stable step on


BETWEEN_RANKS, BETWEEN_NODES = Link(latency_ms=12.0), Link(latency_ms=25.0, bytes_per_s=1e5)
MESSAGE_BYTES = 2 * 5 * 12 * 4  # rows, tokens, width
LATE_S = 0.1
"""By how much the second node begins every step later."""


# --- a run, and another that goes on -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_a_run_freezes_and_goes_on_in_new_processes(host: str, nodes: Nodes, tmp_path: Path) -> None:
    """One stage on each node. Only rank 0's node has the report; the second job has the first one's losses.

    The checkpoint is in a folder that both nodes see, as DeepSpeed wants it.
    """
    told = []
    for resume in (False, True):
        with start(train, host, tmp_path, str(tmp_path / "shared"), resume, nodes=nodes) as job:
            assert job.ended(100.0) == [0, 0], job.output(0) + job.output(1)
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


def test_torchrun_starts_the_example_on_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """As its README does, with ``--nnodes 2``: every node has its own agent, folder and output."""
    agents = [torchrun_on(node, EXAMPLE, *TINY, *freezing(), folder=tmp_path) for node in nodes]
    try:
        said = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for node in nodes:
            node.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert "stable freezing" in said[0]
    assert "loss" in said[1]  # the last stage is there
    report = Report.read(node_folder(tmp_path, 0) / "out" / "timely_freeze" / "report.json")
    assert report.status == "stable"
    assert not list(node_folder(tmp_path, 1).rglob("report.json"))


# --- transfers between clocks --------------------------------------------------------------------------------------


def test_transfers_are_those_of_the_links_although_clocks_and_starts_differ(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four stages, two on a node. The second node's clock is a day ahead, and it begins its steps later."""
    with start(train_over_links, "torch", tmp_path, size=4, nodes=nodes) as job:
        assert job.ended(100.0) == [0] * 4, job.output(0) + job.output(3)
        told = [job.events(rank)[-1] for rank in range(4)]
    clocks = [event["clock_s"] for event in told]
    assert min(clocks[2:]) - max(clocks[:2]) > 86_000
    schedule = PipelineSchedule.from_text(told[0]["ranks"])
    planned_with = Gaps.from_json(told[0]["gaps"]).communication
    assert set(planned_with) == set(schedule.transfers())
    for (source, target), ms in planned_with.items():
        assert ms == pytest.approx(way_ms(source.stage, target.stage), rel=0.15, abs=0.5), (source, target)

    steps = complete_steps(schedule, [traces_of(event) for event in told])
    assert len(steps) >= 2
    monkeypatch.setattr(transfers, "_clocks", lambda *_: dict.fromkeys(range(4), 0.0))  # the check can fail
    unaligned = measure_gaps(schedule, steps).communication
    way = way_ms(1, 2)
    assert any(abs(ms - way) > 0.5 * way for (s, t), ms in unaligned.items() if {s.stage, t.stage} == {1, 2})


def way_ms(stage: int, other: int) -> float:
    """How long the link model has a message between two stages under way."""
    link = BETWEEN_NODES if {stage, other} == {1, 2} else BETWEEN_RANKS
    return link.latency_ms + MESSAGE_BYTES / link.bytes_per_s * 1e3


def train_over_links(tell: Tell, host: str) -> None:
    """Train until there is a plan, over links that are emulated by the clock that all nodes share."""
    import torch.distributed as dist

    import tf_adapters.torch_pipelining

    section = {**SECTION, "warmup_steps": 2, "monitoring_steps": 8, "output_dir": "out"}
    with EmulatedLinks(BETWEEN_RANKS, {(1, 2): BETWEEN_NODES}, clock=time.time):
        run = build(Case(ranks=4, microbatches=4, section=None))
        adapter = tf_adapters.torch_pipelining.attach(run.schedule, section, optimizer=run.optimizers)
        controller = adapter.controller
        for number in range(11):
            dist.barrier()
            time.sleep(LATE_S * (dist.get_rank() // 2))
            run.train_step(number)
        steps = controller.timer.traces(Phase.MONITORING_UPPER, controller.schedule.num_microbatches)
        gaps, ranks = controller.state.measured.gaps.to_json(), controller.schedule.to_text()
        adapter.detach()
    traces = [
        (number, {str(action): (interval.start_ms, interval.end_ms) for action, interval in step.items()})
        for number, step in steps
    ]
    tell(clock_s=time.monotonic(), gaps=gaps, ranks=ranks, traces=traces)


def traces_of(event: dict[str, Any]) -> list[tuple[int, Trace]]:
    return [(n, {Action.parse(text): Interval(*pair) for text, pair in step.items()}) for n, step in event["traces"]]
