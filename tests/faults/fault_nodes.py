"""Two nodes: torchrun starts them, their clocks differ, one dies or falls silent; ``two_nodes`` says what a node is."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from disturbed_runs import LIFE, each_host, report_of, train, train_beside
from jobs import GRACE_S, start
from launching import BIN, ROOT
from node_links import timed_run, way_ms
from two_nodes import PORT, Node, node_folder

from tf_adapters.report import Report
from tf_adapters.testing.ranks import HANG_S

SILENT_AFTER_S = 5.0
"""The host's own timeout where a node falls silent."""
EXAMPLE = ROOT / "examples" / "torch_llama" / "train.py"
TINY = ("--layers", 4, "--width", 16, "--heads", 2, "--context", 8, "--microbatches", 4, "--steps", 18)
FREEZE = {
    "max-freeze-ratio": 0.8,
    "warmup-steps": 1,
    "monitoring-steps": 4,
    "progressive-steps": 2,
    "on-error": "raise",
    "report-every": 1,
}


@each_host
@pytest.mark.parametrize("phase", ["monitoring_upper", "planning", "stable"])
@pytest.mark.parametrize("dead", [0, 1])
def fault_a_node_dies(host: str, phase: str, dead: int, nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """Two stages, two replicas. The other node's ranks end with the host's own error, and its report is whole."""
    with start(train_beside, host, tmp_path, LIFE, 100_000, size=4, nodes=nodes) as job:
        job.wait_for(lambda event: event.get("phase") == phase, rank=2 * dead)
        nodes[dead].kill()
        codes = job.ended(GRACE_S)
        lost = {2 * dead, 2 * dead + 1}
        assert {rank for rank, code in enumerate(codes) if code == -signal.SIGKILL} == lost
        for rank in {0, 1, 2, 3} - lost:
            said = job.output(rank)
            assert codes[rank] == 1, said
            assert said.count("Traceback (most recent call last)") <= 1 + said.count("above exception"), said
        assert job.orphans() == []
        assert nodes[0].processes() == nodes[1].processes() == []
        report_of(tmp_path)


def fault_a_node_falls_silent(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """Its link is gone and no connection is closed: both ends wait for the host's timeout, not for another of ours.

    Only torch's pipelines have the timeout of the job; the other hosts' groups have half an hour of their own.
    """
    section = {"replan_interval": 1}
    with start(train, "torch", tmp_path, section, 100_000, nodes=nodes, timeout_s=SILENT_AFTER_S) as job:
        job.wait_for(lambda event: event.get("phase") == "stable")
        nodes[1].disconnect()
        assert job.ended(GRACE_S) == [1, 1]
        for rank in range(2):
            assert "timed out" in job.output(rank).lower(), job.output(rank)
        assert nodes[0].processes() == nodes[1].processes() == []


def fault_torchrun_starts_the_example_on_two_nodes(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """As its README does, with ``--nnodes 2``: every node has its own agent, folder and output."""
    agents = [torchrun_on(node, EXAMPLE, *TINY, *freezing(), folder=tmp_path) for node in nodes]
    try:
        said = [agent.communicate(timeout=HANG_S)[0] for agent in agents]
    finally:
        for node in nodes:
            node.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert "stable freezing" in said[0]
    assert "loss" in said[1]  # the last stage is there
    report = Report.read(node_folder(tmp_path, 0) / "out" / "timely_freeze" / "report.json")
    assert report.status == "stable"
    assert not list(node_folder(tmp_path, 1).rglob("report.json"))


def fault_torchruns_node_dies(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """Agent and rank of the second node are killed: the first node's agent ends by itself, with an error."""
    more = ("--steps", 1_000_000, "--log-every", 1)
    agents = [torchrun_on(node, EXAMPLE, *TINY, *more, *freezing(), folder=tmp_path) for node in nodes]
    try:
        said = ""
        while "stable freezing" not in said:
            assert agents[0].stdout is not None
            line = agents[0].stdout.readline()
            assert line, said
            said += line
        nodes[1].kill()
        said += agents[0].communicate(timeout=GRACE_S)[0]
        assert agents[0].returncode == 1, said
        deadline = time.monotonic() + 10.0
        while nodes[0].processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert nodes[0].processes() == []
    finally:
        for node, agent in zip(nodes, agents, strict=True):
            node.kill()
            agent.wait()


def freezing() -> list[str]:
    """The example's options that freeze to the end of ``TINY`` steps."""
    return [
        "--timely-freeze",
        "--timely-freeze-output-dir=out",
        *(f"--timely-freeze-{k}={v}" for k, v in FREEZE.items()),
    ]


def torchrun_on(node: Node, *command: object, folder: Path) -> subprocess.Popen[str]:
    """Start one node's agent of torchrun, with one rank."""
    meeting = ("--nnodes", 2, "--node-rank", node.number, "--master-addr", "192.0.2.1", "--master-port", PORT)
    own = node_folder(folder, node.number)
    variables = [f"{name}={value}" for name, value in {**node.environment(), "OMP_NUM_THREADS": "1"}.items()]
    return subprocess.Popen(
        node.command("env", *variables, BIN / "torchrun", "--nproc-per-node", 1, *meeting, *command, folder=own),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fault_nothing_but_clocks_that_differ(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """Every measured transfer is its link's. On a machine that others use as well this may fail."""
    for (source, target), ms in timed_run(nodes, tmp_path).transfers.items():
        assert ms == pytest.approx(way_ms(source.stage, target.stage), rel=0.15, abs=0.5), (source, target)
