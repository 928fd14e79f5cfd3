"""Messages with many ranks: the benchmark's path, its fit, and how many messages a stable step sends."""

from __future__ import annotations

from typing import Any

import pytest
from rank_pools import fork_ranks

from benchmarks.core import many_ranks
from benchmarks.gpu.parts import Options
from benchmarks.gpu.pipeline import Training
from benchmarks.shared.files import ROOT
from tf_adapters.collectives import ProcessGroupCollectives

STEPS = 12


def messages_of_stable_steps(folder: str) -> list[list[str]]:
    """Return the collectives that each step of an exact run begins, once it has a plan."""
    begun: list[str] = []
    for name in ("gather", "collect", "broadcast", "scatter"):
        plain = getattr(ProcessGroupCollectives, name)

        def counted(self: Any, *args: Any, name: str = name, plain: Any = plain) -> Any:
            begun.append(name)
            return plain(self, *args)

        setattr(ProcessGroupCollectives, name, counted)
    training = Training(Options("cpu", tiny=True, folder=folder))
    training.attach_planned(0.0, goal="exact")
    counts: list[list[str]] = []
    for _ in range(2 + STEPS):
        begun.clear()
        training.step()
        counts.append(list(begun))
    training.detach()
    return counts[2:]


@pytest.mark.distributed
def test_a_stable_step_sends_nothing(tmp_path: Any) -> None:
    """Except for one message about the checks of the first step, and one for the report in the tenth step."""
    with fork_ranks(2) as ranks:
        for steps in ranks.run(messages_of_stable_steps, str(tmp_path)):
            assert [sent for sent in steps if sent] == [["gather"], ["collect"]]
            assert len(steps) == STEPS


@pytest.mark.programs
def test_light_ranks_exchange_the_messages_of_a_run() -> None:
    row = many_ranks.measured(4)
    assert row["sockets"] >= 3
    assert set(row["cpu_ms"]) == set(many_ranks.STEPS)


def test_the_fit_is_a_line_and_a_parabola_for_rank_0() -> None:
    rows = {
        str(size): {
            "sockets": size - 1,
            "kib": 100.0,
            "cpu_ms": dict.fromkeys(many_ranks.STEPS, 2.0 * size),
            "cpu_ms_rank_0": dict.fromkeys(many_ranks.STEPS, size**2 / 4),
        }
        for size in (2, 4, 8)
    }
    row = many_ranks.fitted(rows, 1000)
    assert row["sockets"] == pytest.approx(999)
    assert row["kib"] == pytest.approx(100)
    assert row["cpu_ms"]["plan"] == pytest.approx(2000)
    assert row["cpu_ms_rank_0"]["all"] == pytest.approx(1e6)


def test_the_page_shows_the_committed_table() -> None:
    assert many_ranks.table(many_ranks.read_rows()) in (ROOT / "docs" / "gpu.md").read_text()
