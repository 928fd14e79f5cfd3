"""Speed of exact steps with replicas, whose gradients are reduced over a slow link, on emulated devices.

1F1B of torch.distributed.pipelining runs on four stages with two replicas each, in DistributedDataParallel with a
bucket for each layer. Ranks of a replica meet after each batch, as they do for the norm of gradients. Every operation
sleeps as long as a slow device would compute. Each rank has a link for its reductions, and a reduction takes as long as
its bytes need on that link. Order, communication and waiting are torch's own. Durations are emulated, so no figure is
one of a GPU.

Writes results/hosts/reductions.json and the table into docs/deferral.md.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import tf_adapters.torch_pipelining
from benchmarks.hosts.overlapping import step_ms
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.testing import RankPool
from tf_adapters.testing.emulated_device import EmulatedDevice

RESULTS = result_file("hosts/reductions.json")
PAGE = ROOT / "docs" / "deferral.md"
STAGES, REPLICAS, MICROBATCHES = 4, 2, 8
LAYERS, WIDTH, ROWS = 4, 64, 32
RATE = 2 * LAYERS * ROWS * WIDTH**2 / 0.03
"""FLOP/s of a device. A forward of a stage then takes 30 ms."""
BATCH_S = 0.03 * 3 * (MICROBATCHES + STAGES - 1)
SHARES = (0.0, 0.2)
"""How long a stage's reductions take, as shares of a batch of the host alone."""
PHASES = {"warmup_steps": 2, "monitoring_steps": 10}
STEPS, SETTLE = 34, 14


def main() -> None:
    command_line(__doc__).parse_args()
    rows = {}
    with RankPool(STAGES * REPLICAS, setup) as pool:
        for share in SHARES:
            alone, exact = (pool.run(run, share, exact, timeout_s=600)[0] for exact in (False, True))
            rows[str(share)] = {"alone": alone, "exact": exact, "same_weights": alone["weights"] == exact["weights"]}
            print(share, rows[str(share)], flush=True)
    write_json(RESULTS, {"machine": machine("torch"), "device": "emulated", "rows": rows})
    text = table(rows)
    put_table(PAGE, "reductions", text)
    print(text)


def setup() -> None:
    torch.set_num_threads(1)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1  # type: ignore[attr-defined]  # else the first bucket holds all layers


@dataclass
class Link:
    """Carries one rank's reductions, one after the other.

    ``bytes_per_s`` is its speed; None adds no time to a reduction.
    """

    group: Any
    bytes_per_s: float | None

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def reduce(self, state: None, bucket: Any) -> Any:
        """Begin to reduce a bucket: a communication hook of DDP."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._thread.submit(self._carry, bucket.buffer(), future)
        return future

    def _carry(self, gradients: torch.Tensor, future: Any) -> None:
        try:
            if self.bytes_per_s is not None:
                time.sleep(gradients.numel() * gradients.element_size() / self.bytes_per_s)
            dist.all_reduce(gradients, group=self.group)
            future.set_result(gradients.div_(REPLICAS))
        except Exception as error:
            future.set_exception(error)


def run(share: float, exact: bool) -> dict[str, Any]:
    """Return the step in ms, with or without exact steps, and a sum of the weights. Called on all ranks at once."""
    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("dp", "pp"))
    replicas, pipeline = mesh["dp"].get_group(), mesh["pp"].get_group()
    stage = pipeline.rank()
    torch.manual_seed(stage)
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    layer_bytes = 4 * WIDTH**2
    model = DistributedDataParallel(layers, process_group=replicas, bucket_cap_mb=layer_bytes / 2**20)
    link = Link(replicas, LAYERS * layer_bytes / (share * BATCH_S) if share else None)
    Link.reduce.__annotations__.clear()  # DDP compares them with types, and they are texts
    model.register_comm_hook(None, link.reduce)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    pipe = PipelineStage(model, stage, STAGES, torch.device("cpu"), group=pipeline)
    schedule = Schedule1F1B(pipe, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(100 + mesh["dp"].get_local_rank())
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH)
    begins = []
    with EmulatedDevice(RATE, real_time=True) as device:
        settings = {**PHASES, "goal": "exact", "replan_threshold": 0.0, "output_dir": "runs/bench/reductions"}
        attached = tf_adapters.torch_pipelining.attach(schedule, settings, optimizer=optimizer) if exact else None
        for _ in range(STEPS):
            begins.append(time.perf_counter())
            schedule.step(*([batch] if stage == 0 else []), **({"target": batch} if stage == STAGES - 1 else {}))
            dist.all_reduce(torch.zeros(()), group=pipeline)
            optimizer.step()
            optimizer.zero_grad()
        step = step_ms(begins[SETTLE:])
        if attached is not None:
            attached.detach()
    weights = sum(parameter.detach().double().sum() for parameter in layers.parameters())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, float(weights))
    return {"step_ms": step, "weights": every, "emulation_error": device.error}


def table(rows: dict[str, Any]) -> str:
    """Return a row for each link speed. A column has the speed divided by the speed without reductions."""
    free = None
    lines = []
    for share, row in rows.items():
        speed = row["alone"]["step_ms"] / row["exact"]["step_ms"]
        free = free or speed
        steps = [f"{row[way]['step_ms']:.0f} ms" for way in ("alone", "exact")]
        same = "yes" if row["same_weights"] else "**no**"
        lines.append([f"{float(share):.0%} of a batch", *steps, f"{speed:.3f}x", f"{speed / free:.2f}", same])
    head = ["a stage's reductions take", "1F1B alone", "exact", "speed", "speed / without reductions", "same weights"]
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
