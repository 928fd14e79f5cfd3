"""Steps that overlap: speed with deferred weight gradients where ranks do not meet between steps, on emulated devices.

Four pipeline ranks with equal stages, 1F1B, 8 microbatches; another size with --ranks and --microbatches. A step's time is
the median time from a rank's beginning of a step to its beginning of the next one, of the rank where it is longest:
nothing in the loop makes ranks meet. Every operation sleeps as long as a slow device would compute; order,
communication and waiting are the engine's own.

Writes results/hosts/overlapping.json, host by host, and the table into docs/deferral.md.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import torch.distributed as dist

from benchmarks.hosts.emulated import RATE
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, keep_row, markdown_table, put_table, read_part, result_file
from benchmarks.shared.measuring import machine
from benchmarks.shared.trainings import HOSTS, Size, Training, setup, start
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice
from tf_adapters.testing.paired import Freezing

RESULTS = result_file("hosts/overlapping.json")
PAGE = ROOT / "docs" / "deferral.md"
MICROBATCHES = 8
PHASES = {"warmup": 2, "monitoring": 10, "progressive": 0, "stable": 40}
SETTLE = 4
"""Steps after a change that do not count."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (4)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a batch (8)")
    args = parser.parse_args()
    print(args, RESULTS, PAGE, keep_row, markdown_table, put_table, read_part, machine)
    for host in args.hosts:
        measure(host, Size(ranks=args.ranks, layers=2 * args.ranks, width=192, context=16, micro_batch=2, microbatches=args.microbatches))


def measure(host: str, size: Size) -> dict[str, Any]:
    with RankPool(size.ranks, functools.partial(setup, host)) as ranks:
        alone = ranks.run(run_alone, host, size, timeout_s=900)[0]
        print(host, alone)
        row = {"alone": alone}
        for extra in (0, size.ranks // 2, size.ranks):
            out = row[str(extra)] = ranks.run(run_exact, host, size, extra, timeout_s=900)[0]
            out["speedup"] = alone["step_ms"] / out["step_ms"]
            out["same_losses"] = out.pop("losses") == alone["losses"]
            print(host, extra, out, flush=True)
    return row


def run_alone(host: str, size: Size) -> dict[str, Any]:
    with EmulatedDevice(RATE, real_time=True) as device:
        training = start(host, Freezing(), alone=True, size=size)
        begins, losses = _train(training, sum(PHASES.values()))
        return {"step_ms": _step_ms(begins[SETTLE:]), "losses": losses, "emulation_error": device.error}


def run_exact(host: str, size: Size, extra: int) -> dict[str, Any]:
    section = {"monitoring_precision": 0.02, "replan_threshold": 0.0, "weight_gradients": "deferred", "max_freeze_ratio": 0.0, "extra_microbatches": extra}
    freezing = Freezing(**PHASES, output_dir=f"runs/bench/overlapping/{host}", settings=section)
    with EmulatedDevice(RATE, real_time=True) as device:
        training = start(host, freezing, size=size)
        controller = training.adapter.controller
        begins, losses = _train(training, freezing.steps)
        settled = controller.state.phases.progressive_end + SETTLE
        forecast, known = controller.forecast, controller.state.measurement
        training.detach()
    step_ms = _step_ms(begins[settled:])
    return {
        "step_ms": step_ms,
        "planned_ms": forecast.planned_ms,
        "planned_speedup": forecast.unfrozen_ms / forecast.planned_ms,
        "measured_over_planned": step_ms / forecast.planned_ms,
        "steps": known.steps,
        "between": dict(known.between_steps),
        "losses": losses,
        "emulation_error": device.error,
    }


def _train(training: Training, steps: int) -> tuple[list[float], list[float]]:
    """When each step began on this rank, s, and the losses of the steps. No rank waits for another between steps."""
    begins, losses = [], []
    for _ in range(steps):
        begins.append(time.perf_counter())
        loss = training.step()
        losses.append(None if loss is None else float(loss))
    return begins, losses


def _step_ms(begins: list[float]) -> float:
    """The median step of the rank where it is longest. Called on all ranks at once."""
    own = statistics.median(1e3 * (after - before) for before, after in zip(begins, begins[1:], strict=False))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return max(every)


if __name__ == "__main__":
    main()
