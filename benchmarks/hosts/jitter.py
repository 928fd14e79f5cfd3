"""Speed of each goal on devices whose speed varies, and over a link that stalls, beside the host alone.

A plan fixes the order of a batch for all steps. The host's own order is fixed, too. This shows which of them loses more
where actions do not take the time that was measured. Four emulated devices run torch's real engine: 1F1B, 8
microbatches, equal stages, nothing that makes ranks meet. The speed of each device is drawn anew every 60 ms, which is
the time of a forward. Of a link, every 40th message takes 120 ms longer.

Writes results/hosts/jitter.json and the table into docs/deferral.md.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch.distributed as dist

from benchmarks.hosts.goals import ALONE, SIZE, cell, run
from benchmarks.hosts.overlapping import RATES
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import setup
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_link import EmulatedLinks, Link

RESULTS = result_file("hosts/jitter.json")
PAGE = ROOT / "docs" / "deferral.md"
HOST = "torch"
WAYS = ("exact", "exact, extra_microbatches 4", "paper")
JITTER = {"no jitter": 0.0, "5%": 0.05, "10%": 0.10, "20%": 0.20}
"""Standard deviation of the time that a device takes, as a share."""
STALLS = "a link that stalls"
EVERY, STALL_S = 40, 0.12


class StallingLinks(EmulatedLinks):
    """Links without delay, except that one in ``EVERY`` messages between ranks 1 and 2 arrives ``STALL_S`` later."""

    def __init__(self, seed: int) -> None:
        super().__init__(edges={(1, 2): Link()})
        self._random = random.Random(seed)

    def arrival(self, peer: int, link: Link, size: int) -> tuple[float, float]:
        sent, arrives = super().arrival(peer, link, size)
        return sent, arrives + (STALL_S if self._random.random() < 1.0 / EVERY else 0.0)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--conditions", nargs="+", choices=[*JITTER, STALLS], default=[*JITTER, STALLS])
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    for condition in [] if args.table else args.conditions:
        with RankPool(SIZE.ranks, functools.partial(setup, HOST)) as pool:
            row = {way: pool.run(disturbed, condition, way, timeout_s=1200)[0] for way in (ALONE, *WAYS)}
        print(condition, {way: of["step_ms"] for way, of in row.items()}, flush=True)
        rows = {condition: {**row, "machine": machine(HOST)}}
        keep_row(RESULTS, "rows", rows, [*JITTER, STALLS], device="emulated", rate=RATES[HOST])
    text = table(read_rows())
    put_table(PAGE, "jitter", text)
    print(text)


def read_rows() -> dict[str, Any]:
    """The figures that have been measured, by condition."""
    return read_part(RESULTS, "rows")


def disturbed(condition: str, way: str) -> dict[str, Any]:
    """The step of a goal, or of the host alone, in a condition. Called on all ranks at once."""
    links = StallingLinks(dist.get_rank()) if condition == STALLS else None
    return run(HOST, way, JITTER.get(condition, 0.0), links=links)


def table(rows: dict[str, Any]) -> str:
    """One line for each condition, one column for the host and for each goal."""
    lines = [
        [condition, f"{row[ALONE]['step_ms']:,.0f} ms", *(cell(row, way) for way in WAYS)]
        for condition, row in rows.items()
    ]
    return markdown_table(["", ALONE, *WAYS], lines)


if __name__ == "__main__":
    main()
