"""Cost of control with many ranks: bytes and time of all messages between ranks that freezing causes.

Real ranks over gloo on this machine run our own collectives on synthetic steps of a realistic size: 1F1B, 64
microbatches, 32 traced steps; 48 tensors of 400,000 elements on a stage. Bytes for 1,024 and 8,192 ranks (64 stages)
follow from the measured messages, whose number and sizes are known. Each rank's processor time is extrapolated along a
plane in the numbers of ranks and of stages. Wall-clock times are in the JSON only, since the ranks share this machine's
cores.

Prints a table, writes results/core/control.json and the table into docs/algorithm.md.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.core.control_events import MICROBATCHES, OfRank, measure
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.testing import RankPool

CASES = ((2, 2), (4, 2), (8, 4), (16, 2), (16, 8))  # ranks, stages; the last one is extrapolated from
LARGE = (1_024, 8_192)
STAGES_OF_LARGE = 64
FIRST_BROADCAST = 520  # bytes that every decision takes, however small it is
PRELOAD = ("tf_adapters.testing", "tf_adapters.training.controller", "tf_adapters.report.observer", "scipy.optimize")
RESULTS = result_file("core/control.json")


@dataclass(frozen=True)
class Row:
    """One event at one number of ranks.

    Attributes:
        of_first_replica: most bytes that a rank of the first replica sends.
        of_others: most bytes that another rank sends.
        of_each: bytes that each rank adds to what all ranks receive.
        received_by_first: bytes that rank 0 receives.
        received: bytes that each other rank receives.
        cpu_ms: median processor time of the rank that takes most.
        wall_ms: the slowest rank's median on this machine; None where it follows from smaller numbers of ranks.
    """

    event: str
    ranks: int
    stages: int
    of_first_replica: int
    of_others: int
    of_each: int
    received_by_first: int
    received: int
    cpu_ms: float
    wall_ms: float | None = None


def main() -> None:
    parser = command_line(__doc__)
    names = {f"{size}x{stages}": (size, stages) for size, stages in CASES}
    parser.add_argument("--cases", nargs="+", choices=names, default=list(names), help="ranks x stages")
    parser.add_argument("--checks", action="store_true", help="stability checks only; all other rows stay")
    args = parser.parse_args()
    for size, stages in map(names.__getitem__, args.cases):
        began = time.perf_counter()
        with RankPool(size, preload=PRELOAD) as pool, tempfile.TemporaryDirectory() as folder:
            ranks = pool.run(measure, folder, stages, not args.checks, timeout_s=900)
        rows = [row_of(event, stages, [rank[event] for rank in ranks]) for event in ranks[0]]
        keep(stages, rows, stay=args.checks)
        print(f"{size} ranks, {stages} stages measured in {time.perf_counter() - began:.0f} s", flush=True)
    rows = read_rows()
    events = list(dict.fromkeys(row.event for row in rows if row.ranks in LARGE))  # of which all cases are there
    table = table_of(events, rows)
    print(table)
    put_table(ROOT / "docs" / "algorithm.md", "control", table)


def read_rows() -> list[Row]:
    """Return the measured and the extrapolated rows."""
    return [Row(**row) for row in json.loads(RESULTS.read_text())["rows"]] if RESULTS.exists() else []


def keep(stages: int, measured: Sequence[Row], stay: bool) -> None:
    """Replace the rows of one case and extrapolate again.

    Rows of other events ``stay``, or are dropped.
    """
    old = [row for row in read_rows() if row.ranks not in LARGE]
    names = [row.event for row in measured]
    events = list(dict.fromkeys([*(row.event for row in old if stay), *names]))
    case = (measured[0].ranks, stages)
    others = [row for row in old if (row.ranks, row.stages) != case or (stay and row.event not in names)]
    rows = sorted(
        (row for row in (*others, *measured) if row.event in events), key=lambda r: CASES.index((r.ranks, r.stages))
    )
    for event in events:
        of_event = [row for row in rows if row.event == event]
        if len(of_event) == len(CASES):
            rows += [extrapolated(of_event, size) for size in LARGE]
    record = {"machine": machine(), "microbatches": MICROBATCHES, "rows": [asdict(row) for row in rows]}
    write_json(RESULTS, record)


def row_of(event: str, stages: int, measured: list[OfRank]) -> Row:
    ranks = len(measured)
    sent = [rank.gathered + rank.sent for rank in measured]
    gathered = ranks * measured[0].gathered
    return Row(
        event=event,
        ranks=ranks,
        stages=stages,
        of_first_replica=max(sent[:stages]),
        of_others=max(sent[stages:], default=0),
        of_each=measured[0].gathered,
        received_by_first=gathered + sum(rank.sent for rank in measured),
        received=gathered + measured[0].given,
        cpu_ms=max(rank.cpu_ms for rank in measured),
        wall_ms=max(rank.wall_ms for rank in measured),
    )


def extrapolated(measured: list[Row], ranks: int) -> Row:
    """Every rank adds as much as now, and each stage of the first replica; broadcasts grow with the stages."""
    largest = measured[-1]
    other = largest.of_others
    own = largest.received_by_first - largest.ranks * other
    long = largest.received - largest.ranks * largest.of_each - FIRST_BROADCAST
    return Row(
        event=largest.event,
        ranks=ranks,
        stages=STAGES_OF_LARGE,
        of_first_replica=largest.of_first_replica,
        of_others=other,
        of_each=largest.of_each,
        received_by_first=round(ranks * other + own * (STAGES_OF_LARGE - 1) / (largest.stages - 1)),
        received=round(ranks * largest.of_each + FIRST_BROADCAST + max(0, long) * STAGES_OF_LARGE / largest.stages),
        cpu_ms=processor_ms(measured, ranks),
    )


def processor_ms(measured: Sequence[Row], ranks: int) -> float:
    """Along a plane in the numbers of ranks and of stages."""
    cases = np.array([[1.0, row.ranks, row.stages] for row in measured])
    start, of_rank, of_stage = np.linalg.lstsq(cases, np.array([row.cpu_ms for row in measured]))[0].tolist()
    return float(max(measured[-1].cpu_ms, start + max(0.0, of_rank) * ranks + max(0.0, of_stage) * STAGES_OF_LARGE))


def table_of(events: list[str], rows: list[Row]) -> str:
    """Bytes and times, one line for each event."""
    sizes = (CASES[0][0], CASES[-1][0], *LARGE)
    head = ["sent by a rank of one replica", "by another", *(f"{n:,} ranks: rank 0 gets, processor" for n in sizes)]
    lines = []
    for event in events:
        by_size = {row.ranks: row for row in rows if row.event == event}  # of two cases with 16 ranks, the last one
        largest = by_size[CASES[-1][0]]
        cells = [kilobytes(largest.of_first_replica), kilobytes(largest.of_others)]
        cells += [f"{kilobytes(by_size[n].received_by_first)}, {by_size[n].cpu_ms:,.0f} ms" for n in sizes]
        lines.append([event, *cells])
    return markdown_table(["", *head], lines)


def kilobytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    return f"{count / 1024:,.1f} KB" if count < 1 << 20 else f"{count / (1 << 20):,.1f} MB"


if __name__ == "__main__":
    main()
