"""What our messages cost with many ranks: sockets, memory and time of our gloo group, of attach, a plan and a report.

Light processes without a model join a job whose own backend sends nothing (torch's "fake"). They exchange messages as a
run does, of fixed sizes. Ranks share this machine's cores, so the CPU
time of a rank is the figure that holds elsewhere. A line through it gives the cost for more ranks. Rank 0 also serves
the job's store, from which each rank reads the address of each other one: a parabola through its CPU time.

Writes results/core/many_ranks.json and the table into docs/gpu.md.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.collectives import (
    Collectives,
    ProcessGroupCollectives,
    decide_from_all,
    on_all_ranks,
    to_first_rank,
)
from tf_adapters.testing import RankPool
from tf_adapters.testing.ranks import free_port

RESULTS = result_file("core/many_ranks.json")
PAGE = ROOT / "docs" / "gpu.md"
SIZES = (16, 64, 128)
FITTED = (1024, 16384)
PRELOAD = ("torch", "torch.testing._internal.distributed.fake_pg", "tf_adapters.collectives", "numpy")
DESCRIPTION, MEASUREMENT, PLAN, REPORT = 1_500, 6_000, 8_000, 4_000
"""Bytes of a rank's message at attach, for a plan, of the plan, and for the report."""
STEPS = {"group": "our group", "attach": "attach", "plan": "a plan", "report": "a report"}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.table:
        rows = {str(size): measured(size) for size in args.ranks}
        write_json(RESULTS, {"machine": machine(), "rows": rows})
    text = table(read_rows())
    put_table(PAGE, "many-ranks", text)
    print(text)


def read_rows() -> dict[str, Any]:
    """Return the figures by number of ranks."""
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["rows"]
    return rows


def measured(size: int) -> dict[str, Any]:
    """Return for each step the median and largest CPU ms of a rank, and the ms until all were done."""
    with RankPool(size, functools.partial(join, free_port()), preload=PRELOAD) as pool:
        ranks = pool.run(run, timeout_s=1200)
    row: dict[str, Any] = {"seconds": {}, "cpu_ms": {}, "cpu_ms_rank_0": {}}
    for step in STEPS:
        row["seconds"][step] = max(rank[step][0] for rank in ranks)
        row["cpu_ms"][step] = statistics.median(rank[step][1] for rank in ranks)
        row["cpu_ms_rank_0"][step] = ranks[0][step][1]
    for name in ("sockets", "kib"):
        row[name] = statistics.median(rank[name] for rank in ranks)
        row[f"{name}_rank_0"] = ranks[0][name]
    print(size, row, flush=True)
    return row


def join(port: int) -> None:
    """Join a job that has a store and a backend that sends nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(minutes=10))
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)


def run() -> dict[str, Any]:
    """Make our group, and send the messages of a run. Called on all ranks at once."""
    before = sockets(), private_kib()
    made: list[Collectives] = []
    found: dict[str, Any] = {"group": costs(lambda: made.append(ProcessGroupCollectives()))}
    messages = made[0]
    found["attach"] = costs(lambda: on_all_ranks(messages, lambda: content(DESCRIPTION)))
    found["plan"] = costs(lambda: decide_from_all(messages, lambda: content(MEASUREMENT), lambda _: content(PLAN)))
    found["report"] = costs(lambda: to_first_rank(messages, lambda: content(REPORT)))
    found["sockets"], found["kib"] = sockets() - before[0], private_kib() - before[1]
    messages.gather(None)  # no rank ends while another one needs it
    return found


def content(size: int) -> bytes:
    """Return bytes that do not compress, other ones on each rank."""
    return random.Random(dist.get_rank()).randbytes(size)


def costs(function: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of a call, and the CPU ms of this process and its threads."""
    began, used = time.perf_counter(), cpu_ms()
    function()
    return time.perf_counter() - began, cpu_ms() - used


def cpu_ms() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 1e3 * (usage.ru_utime + usage.ru_stime)


def sockets() -> int:
    """Return the number of open sockets of this process."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def private_kib() -> int:
    """Return the KiB of memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def table(rows: dict[str, Any]) -> str:
    """One line for each number of ranks, measured or fitted."""
    head = ["ranks", "sockets", "memory", *(f"{name}, CPU ms" for name in STEPS.values()), "rank 0: all, CPU ms"]
    lines = [line(size, row) for size, row in rows.items()]
    return markdown_table(head, [*lines, *(line(f"{size}, fitted", fitted(rows, size)) for size in FITTED)])


def fitted(rows: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the figures of lines through the measured ones, and of parabolas for rank 0."""
    sizes = [int(name) for name in rows]

    def at_size(values: list[float], degree: int = 1) -> float:
        return max(0.0, float(np.polyval(np.polyfit(sizes, values, degree), size)))

    row: dict[str, Any] = {name: at_size([one[name] for one in rows.values()]) for name in ("sockets", "kib")}
    row["cpu_ms"] = {step: at_size([one["cpu_ms"][step] for one in rows.values()]) for step in STEPS}
    rank_0 = [sum(one["cpu_ms_rank_0"].values()) for one in rows.values()]
    row["cpu_ms_rank_0"] = {"all": at_size(rank_0, degree=2)}
    return row


def line(name: str, row: dict[str, Any]) -> list[str]:
    cpu = [f"{row['cpu_ms'][step]:,.0f}" for step in STEPS]
    memory = f"{row['kib'] / 1024:,.1f} MiB"
    return [name, f"{row['sockets']:,.0f}", memory, *cpu, f"{sum(row['cpu_ms_rank_0'].values()):,.0f}"]


if __name__ == "__main__":
    main()
