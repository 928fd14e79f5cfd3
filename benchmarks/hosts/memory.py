"""Peak memory of ranks under deferred weight gradients, planned and measured, on every host.

Two CPU ranks, 1F1B, 8 microbatches, a model whose activations are many times its weights, nothing emulated. On
DeepSpeed also four ranks in a V, with the memory of the host's order and with half of its microbatches. Bytes are
those that the C library has handed out to a rank's process, read at the ends of its actions; on an accelerator a run
reads the allocator's.

Writes results/hosts/memory.json, host by host, and the table into docs/deferral.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import HOSTS, Size, setup, start
from tf_adapters.measuring.phase import Phase
from tf_adapters.testing import RankPool
from tf_adapters.testing.paired import PairedSettings

RESULTS = result_file("hosts/memory.json")
PAGE = ROOT / "docs" / "deferral.md"
SIZE = Size(width=128, layers=8, context=256, micro_batch=8, microbatches=8)
FREEZING = {"warmup": 2, "monitoring": 8, "progressive": 0, "stable": 6}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"max_freeze_ratio": 0.0},
    "exact, 4 more microbatches": {"max_freeze_ratio": 0.0, "extra_microbatches": 4},
    "a quarter frozen": {"max_freeze_ratio": 0.25},
}
IN_V: dict[str, dict[str, Any]] = {
    "in a V, exact": {"max_freeze_ratio": 0.0, "placement": "v"},
    "in a V, exact, 4 fewer microbatches": {"max_freeze_ratio": 0.0, "placement": "v", "extra_microbatches": -4},
}
"""On DeepSpeed, on four ranks."""
V_SIZE = replace(SIZE, ranks=4, in_v=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *IN_V], default=[*WAYS, *IN_V])
    args = parser.parse_args()
    for host in args.hosts:
        for name in args.ways:
            if host == "deepspeed" or name in WAYS:
                keep(host, name, measure(host, name))
    rows = read_rows()
    put_table(PAGE, "memory", table(rows))
    print(table(rows))


def read_rows() -> dict[str, Any]:
    """By host, what was measured."""
    return read_part(RESULTS, "hosts")


def keep(host: str, name: str, ranks: list[dict[str, int]]) -> None:
    """Replace the figures of a host and a way."""
    row = {**read_rows().get(host, {}), name: ranks}
    keep_row(RESULTS, "hosts", {host: row}, HOSTS, machine=machine(*HOSTS))


def measure(host: str, name: str) -> list[dict[str, int]]:
    """By rank, in processes of their own."""
    section = {"weight_gradients": "deferred", "replan_threshold": 0.0, **{**WAYS, **IN_V}[name]}
    number, size = [*WAYS, *IN_V].index(name), V_SIZE if name in IN_V else SIZE
    freezing = PairedSettings(**FREEZING, output_dir=f"runs/bench/memory/{host}/{number}", settings=section)
    with RankPool(size.ranks, functools.partial(setup, host)) as ranks:
        return ranks.run(held, host, freezing, size, timeout_s=600)


def held(host: str, freezing: PairedSettings, size: Size) -> dict[str, int]:
    """Peak bytes of this rank: in the host's order, planned, measured. Called on all ranks at once."""
    training = start(host, freezing, size=size)
    for _ in range(freezing.steps):
        training.step()
    controller = training.adapter.controller
    meter, stage = controller.memory, min(controller.parameter_masks)
    model, planned = meter.held(Phase.MONITORING_UPPER), controller.state.batch.planned_peak_bytes(meter, stage)
    bytes_ = {
        "base": round(model.base),
        "host": meter.peak_bytes(Phase.MONITORING_UPPER),
        "planned": planned or model.peak_bytes(controller.schedule.ranks[controller.schedule.rank_of(stage)]),
        "measured": meter.peak_bytes(Phase.STABLE),
    }
    training.detach()
    return bytes_


def table(hosts: Mapping[str, Mapping[str, Sequence[Mapping[str, int]]]]) -> str:
    """Ways down, hosts across; MiB by rank."""
    lines = []
    for way in (*WAYS, *IN_V):
        lines.append([way, *(cell(of_host[way]) if way in of_host else "-" for of_host in hosts.values())])
    return markdown_table(["", *(HOSTS[host] for host in hosts)], lines)


def cell(ranks: Sequence[Mapping[str, int]]) -> str:
    mib = {name: "/".join(f"{rank[name] / 2**20:.0f}" for rank in ranks) for name in ("host", "planned", "measured")}
    ratios = ", ".join(f"{rank['measured'] / rank['planned']:.3f}" for rank in ranks)
    return f"{mib['host']} in the host's order, {mib['planned']} planned, {mib['measured']} measured: {ratios}"


if __name__ == "__main__":
    main()
