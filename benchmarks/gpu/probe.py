"""Check in a minute whether four processes can compute side by side on this GPU: MPS, disjoint SMs, CUDA IPC."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.one_gpu_group import BACKEND, OneGpuGroup
from benchmarks.gpu.parts import Check, Options, Part, Skipped, no_gpu
from benchmarks.gpu.quarters import gathered, interference, seen_sms, take_quarter

ELEMENTS = 1 << 16
MESSAGES = 40  # more than a mailbox has slots


def run(options: Options) -> Iterator[Check]:
    """Check four ranks, each in its quarter. Called on all ranks at once."""
    if options.no_mps:
        raise Skipped(options.no_mps)
    take_quarter(options)
    sets = gathered(seen_sms(options))
    yield Check("SMs of the smallest set", min(map(len, sets)))
    shared = sum(len(set(one) & set(other)) for number, one in enumerate(sets) for other in sets[:number])
    yield Check("SMs in two sets", shared, most=0)
    ratios = gathered(interference(options))
    for kind, most in (("products", 1.05), ("memory", None)):
        slowest = max(of_rank[kind] for of_rank in ratios)
        yield Check(f"{kind}, together over alone", slowest, "x", most=most if options.judged else None)
    yield Check("messages that came as they were sent", transfers(options), least=MESSAGES)


def transfers(options: Options) -> float:
    """Send messages around the ring of ranks. Return the smallest number that arrived intact on a rank."""
    group, device = dist.group.WORLD, options.target()
    assert isinstance(group, OneGpuGroup)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as own:
        group.open(Path(gathered(own)[0]), slot_bytes=4 * ELEMENTS)
        received = torch.empty(ELEMENTS, device=device)
        right = torch.zeros((), device=device)
        before = (rank - 1) % ranks
        for number in range(MESSAGES):
            receive = dist.irecv(received, before)
            dist.isend(torch.full((ELEMENTS,), float(ranks * number + rank), device=device), (rank + 1) % ranks)
            receive.wait()
            right += (received == ranks * number + before).all()
        fewest = min(gathered(float(right)))
        dist.barrier()
    return fewest


PART = Part(
    title="four processes on one GPU: MPS, disjoint sets of SMs, CUDA IPC",
    run=run,
    missing=no_gpu,
    ranks=lambda options: 1 if options.no_mps else 4,
    backend=BACKEND,
    minutes=1.5,
    shares=True,
)
