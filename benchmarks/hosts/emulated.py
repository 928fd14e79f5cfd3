"""Speed with deferred weight gradients and with freezing, on every host's real engine, measured on emulated devices.

Four pipeline ranks, 1F1B, 8 microbatches, tiny layers. Every operation sleeps as long as a slow device would compute:
order, communication and waiting are the engine's own, durations are emulated, and no figure says anything about a GPU.
Each training runs by itself, one after the other; times are medians over steps.

Writes results/hosts/emulated.json, host by host, and the table into docs/deferral.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import ENGINE, HOSTS, Size, setup, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import PairedSettings, timed_step

COLUMNS = {**HOSTS, ENGINE: "Megatron-Core, Transformer Engine's layers"}
"""By host, and by the layers of one, the name."""
RESULTS = result_file("hosts/emulated.json")
PAGE = ROOT / "docs" / "deferral.md"
SIZE = Size(ranks=4, layers=8, width=192, context=16, micro_batch=2)
RATE = 1e9
"""FLOP/s, at which a forward of a stage takes about 100 ms."""

SETTLE = 3
PHASES = {"warmup": 2, "monitoring": 10, "progressive": 0, "stable": 10}
DEFERRED: dict[str, Any] = {"weight_gradients": "deferred"}
IN_PLACE = "in place, r_max 0.8"
VARIANTS: dict[str, dict[str, Any]] = {
    IN_PLACE: {"max_freeze_ratio": 0.8},
    "deferred, exact": {**DEFERRED, "max_freeze_ratio": 0.0},
    "deferred, exact, 4 more microbatches": {**DEFERRED, "max_freeze_ratio": 0.0, "extra_microbatches": 4},
    "deferred, frozen for the speed of the first row, 4 more microbatches": {
        **DEFERRED,
        "target_speedup": IN_PLACE,
        "extra_microbatches": 4,
    },
    "the same from sampled tokens": {
        **DEFERRED,
        "target_speedup": IN_PLACE,
        "extra_microbatches": 4,
        "granularity": "token",
    },
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        choices=range(1, len(VARIANTS) + 1),
        default=list(range(1, len(VARIANTS) + 1)),
        metavar="N",
        help="rows of the table, from 1; the others stay as they are (all)",
    )
    args = parser.parse_args()
    names = [name for number, name in enumerate(VARIANTS, 1) if number in args.rows]
    for host in args.hosts:
        keep(host, measure(host, names))
    text = table(read_rows())
    put_table(PAGE, "emulated", text)
    print(text)


def keep(host: str, row: dict[str, Any]) -> None:
    """Replace the figures of a host, and where they come from."""
    emulation = {"device": "emulated", "rate": RATE, "size": vars(SIZE)}
    keep_row(RESULTS, "hosts", {host: {**row, "machine": machine(*HOSTS)}}, COLUMNS, **emulation)


def read_rows() -> dict[str, Any]:
    """The figures of the hosts that have been measured."""
    return read_part(RESULTS, "hosts")


def measure(host: str, names: Sequence[str]) -> dict[str, Any]:
    """Measure the host alone and these variants; figures of other variants stay as they are."""
    row: dict[str, Any] = dict(read_rows().get(host, {}))
    with RankPool(SIZE.ranks, functools.partial(setup, host)) as ranks:
        alone = row["alone"] = ranks.run(run_alone, host, timeout_s=600)[0]
        for name in names:
            settings = VARIANTS[name]
            if "target_speedup" in settings:  # as fast as that variant
                settings = {**settings, "target_speedup": row[settings["target_speedup"]]["speedup"]}
            row[name] = ranks.run(run_variant, host, settings, timeout_s=900)[0]
            row[name]["speedup"] = alone["step_ms"] / row[name]["step_ms"]
            row[name]["same_loss"] = row[name]["loss"] == alone["loss"]
            print(host, name, {k: v for k, v in row[name].items() if not isinstance(v, list)}, flush=True)
    return row


def run_alone(host: str) -> dict[str, Any]:
    """The host's step in ms, its loss at the end, and how far the emulation was off. Called on all ranks at once."""
    with EmulatedDevice(RATE, real_time=True) as device:
        training = start(host, PairedSettings(), alone=True, size=SIZE)
        times = [timed_step(training.step) for _ in range(sum(PHASES.values()))]
        return {
            "step_ms": statistics.median(times[SETTLE:]),
            "loss": training.held_out_loss(),
            "emulation_error": device.error,
        }


def run_variant(host: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The step in stable freezing beside the plan's, and the loss after as many steps as the host alone ran.

    Called on all ranks at once.
    """
    section = {"monitoring_precision": 0.02, "replan_threshold": 0.0, **settings}
    freezing = PairedSettings(**PHASES, output_dir=f"runs/bench/emulated/{host}", settings=section)
    with EmulatedDevice(RATE, real_time=True) as device:
        training = start(host, freezing, size=SIZE)
        controller = training.adapter.controller
        times: dict[str, list[float]] = {}
        for _ in range(freezing.steps):
            phase = controller.phase.value
            times.setdefault(phase, []).append(timed_step(training.step))
        plan, forecast = controller.state.plan, controller.forecast
        training.detach()
        loss = training.held_out_loss()
    stable = statistics.median(times["stable"][1:])
    return {
        "step_ms": stable,
        "planned_ms": forecast.planned_ms,
        "planned_speedup": forecast.unfrozen_ms / forecast.planned_ms,
        "measured_over_planned": stable / forecast.planned_ms,
        "mean_freeze_ratio": plan.mean_freeze_ratio,
        "loss": loss,
        "emulation_error": device.error,
    }


def table(hosts: dict[str, Any]) -> str:
    lines = [[name, *(cell(row.get(name)) for row in hosts.values())] for name in VARIANTS]
    return markdown_table(["", *(COLUMNS[host] for host in hosts)], lines)


def cell(of: dict[str, Any] | None) -> str:
    if of is None:
        return "not run"
    frozen = f", {of['mean_freeze_ratio']:.2f} frozen" if of["mean_freeze_ratio"] else ""
    same = ", same loss" if of["same_loss"] else ""
    return f"{of['speedup']:.3f}x{frozen}, {of['measured_over_planned']:.3f} of the planned step{same}"


if __name__ == "__main__":
    main()
