"""Quarters of one GPU: disjoint sets of multiprocessors (SMs) for several processes, and checks that they are disjoint.

MPS lets kernels of several processes run at the same time. It changes no setting of the card. Its percentage limits
the SMs of a process; *green contexts* reserve them. Each rank splits off all sets at once and takes one of them: sets
that were split off one by one would overlap. A rank computes in a stream of its green context, because backwards run in
another thread, which takes the stream of the forward and not its context.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.parts import Options
from tf_adapters.measuring.timer import clock_for

GRAIN = 8
"""SMs are split off in multiples of 8 on compute capability 9.0."""
CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/cuda/bin")
FIRST = "import torch; torch.zeros(1, device='cuda')"
SPIN = r"""extern "C" __global__ void which_sm(int* seen, int cycles) {
  int id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  if (threadIdx.x == 0) atomicAdd(seen + id, 1);
  long long begin = clock64();
  while (clock64() - begin < cycles) {}
}"""
_CONTEXTS: list[Any] = []  # a stream lives only as long as its context


def control_program() -> str | None:
    """Return the path of the program that starts MPS; None if there is none."""
    found = shutil.which(CONTROL)
    others = [f"{folder}/{CONTROL}" for folder in PLACES]
    return found or next((path for path in others if os.path.exists(path)), None)


@contextmanager
def mps() -> Iterator[str]:
    """Run MPS for processes that start inside the block. Yield "", or the reason why it did not start."""
    program = control_program()
    if program is None:
        yield f"{CONTROL} was not found"
        return
    folder = tempfile.mkdtemp(prefix="mps-")
    names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    os.environ.update(names)
    try:
        started = subprocess.run([program, "-d"], capture_output=True, text=True, timeout=30)
        if started.returncode == 0:  # the server itself starts with the first process that computes
            started = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=120)
        said = (started.stdout + started.stderr).strip()
        yield "" if started.returncode == 0 else f"MPS did not start: {said[-300:]}"
    finally:
        subprocess.run([program], input="quit\n", capture_output=True, text=True, timeout=30, check=False)
        for name in names:
            os.environ.pop(name, None)
        for log in sorted(Path(folder).glob("*.log")):
            print(f"{log.name}: {log.read_text()[-400:]}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)


def green_streams(parts: int) -> list[torch.cuda.Stream]:
    """Return one stream for each of ``parts`` disjoint sets of SMs. Raises RuntimeError if CUDA refuses."""
    from cuda.bindings import driver

    def value(result: Any) -> Any:
        if int(result[0]):
            raise RuntimeError(f"CUDA: {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    device = value(driver.cuDeviceGet(torch.cuda.current_device()))
    torch.zeros(1, device="cuda")  # makes the primary context
    whole = value(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    size = whole.sm.smCount // parts // GRAIN * GRAIN
    groups, count, _ = value(driver.cuDevSmResourceSplitByCount(parts, whole, 0, size))
    if count != parts:
        raise RuntimeError(f"CUDA made {count} sets of {size} SMs: {parts} are needed")
    streams = []
    for group in groups[:parts]:
        description = value(driver.cuDevResourceGenerateDesc([group], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = value(driver.cuGreenCtxCreate(description, device, flags))
        raw = value(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        _CONTEXTS.append(context)
        streams.append(torch.cuda.get_stream_from_external(int(raw), torch.cuda.current_device()))
    return streams


def take_quarter(options: Options) -> None:
    """Let this rank compute on its set of SMs from here on."""
    if options.cuda:
        torch.cuda.set_stream(green_streams(dist.get_world_size())[dist.get_rank()])


def seen_sms(options: Options) -> list[int]:
    """Return the SMs on which this rank's kernels ran; on a CPU the rank's number stands for them."""
    if not options.cuda:
        return [dist.get_rank()]
    kernel = torch.cuda._compile_kernel(SPIN, "which_sm")
    seen = torch.zeros(256, dtype=torch.int32, device="cuda")
    kernel((1024, 1, 1), (32, 1, 1), [seen, 200_000])
    torch.cuda.synchronize()
    return [int(number) for number in seen.nonzero().flatten()]


def timed_ms(options: Options, function: Callable[[], Any], times: int) -> float:
    """Return the mean time of a call in this rank's stream, in ms."""
    function()
    clock = clock_for(options.target())
    clock.synchronize()
    begin = clock.mark()
    for _ in range(times):
        function()
    end = clock.mark()
    clock.synchronize()
    return float(clock.elapsed_ms(begin, end) or 0.0) / times


def alone_and_together(options: Options, function: Callable[[], Any], times: int) -> tuple[float, float]:
    """Return a call's mean ms while the other ranks wait, and while all ranks run it. Called on all ranks at once."""
    alone = 0.0
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == dist.get_rank():
            alone = timed_ms(options, function, times)
    dist.barrier()
    return alone, timed_ms(options, function, times)


def interference(options: Options) -> dict[str, float]:
    """Return this rank's time together over its time alone, for matrix products and for passes through memory."""
    device, dtype = options.target(), torch.bfloat16 if options.cuda else torch.float32
    width, long = (4096, 1 << 27) if options.cuda else (128, 1 << 16)
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    memory = torch.randn(long, device=device, dtype=dtype)
    functions = {"products": lambda: left @ right, "memory": lambda: memory.mul_(1.0)}
    ratios = {}
    for name, function in functions.items():
        alone, together = alone_and_together(options, function, 60 if options.cuda else 20)
        ratios[name] = together / alone
    return ratios


def gathered(value: Any) -> list[Any]:
    """Return every rank's value. Called on all ranks at once."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
