"""This rank's device: its GPU, or one CPU core in its place. Import it before Megatron, which asks for CUDA at once."""

from __future__ import annotations

import os
import warnings

import torch

GPU = torch.cuda.device_count() > 0

if not GPU:
    import tf_adapters.testing.megatron_on_cpu

    tf_adapters.testing.megatron_on_cpu.install()  # a plain CPU answers for CUDA
    warnings.filterwarnings("ignore", module=r"megatron\.")  # page after page on what it misses that needs a GPU
    torch.set_num_threads(1)  # one rank, one core
    torch.set_flush_denormal(True)  # arithmetic on denormal numbers is many times slower


def join_ranks() -> None:
    """Join the ranks that torchrun started, each with a device of its own."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's tensor parallelism relies on it
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if GPU else "gloo")
