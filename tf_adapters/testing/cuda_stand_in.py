"""A stand-in for ``torch.cuda`` on the CPU, so that code for one GPU per process runs without a GPU.

It is for experiments and tests: Megatron-Core uses "cuda" everywhere. ``install()`` makes ``torch.cuda`` one device
whose tensors are plain CPU tensors. Streams and events do nothing, and there is one random generator. It changes torch
for the whole process, and does nothing on a machine with a GPU.
"""

from __future__ import annotations

import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = (
    "tensor as_tensor empty zeros ones full arange linspace eye rand randn randint randperm empty_strided "
    "empty_like zeros_like ones_like full_like rand_like randn_like"
)
_METHODS = "new_tensor new_empty new_zeros new_ones new_full"
_TYPES = "Float Double Half BFloat16 Int Long Byte Bool"


def install() -> None:
    """Let the CPU stand in for CUDA in this process, unless there is a GPU."""
    if torch.cuda.device_count() > 0:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron compiles fusions: minutes of C++ builds on a CPU
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron wants it set with tensor parallelism
    for checks in ("torch._dynamo", "torch._decomp.decompositions_for_jvp"):  # they use torch's functions at import,
        importlib.import_module(checks)  # which must be the real ones
    _replace_factories()
    _replace_conversions()
    _replace_device()
    _replace_generator()


def installed() -> bool:
    """Return whether the stand-in is installed in this process."""
    cuda: Any = torch.cuda
    return cuda._lazy_init is _nothing


def _is_cuda(device: Any) -> bool:
    """Return whether this names the stand-in device: 0, "cuda", "cuda:1" or torch.device("cuda")."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (type(device) is int) or (isinstance(device, str) and device.startswith("cuda"))


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **_without_cuda(kwargs))

    return factory


def _moving(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``to``, whose first argument may be a device."""

    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        return function(self, *args, **_without_cuda(kwargs))

    return to


def _without_cuda(kwargs: dict[str, Any]) -> dict[str, Any]:
    if _is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": "cpu"}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}  # pinning needs a device
    return kwargs


def _replace_factories() -> None:
    for name in _FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS.split():
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for name in _TYPES.split():  # torch.cuda.LongTensor([...])
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _replace_conversions() -> None:
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    own_type = tensor.type

    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:  # Megatron sorts parameters by this text
            return own_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return own_type(self, dtype, *args, **kwargs)

    tensor.type = cuda_type
    tensor.to, module.to = _moving(tensor.to), _moving(module.to)
    tensor.cuda = tensor.pin_memory = module.cuda = lambda self, *args, **kwargs: self


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _replace_device() -> None:
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: False  # otherwise torch makes real calls
    cuda._lazy_init = _nothing
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    for name in ["set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_stream"]:
        setattr(cuda, name, _nothing)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = cuda.nvtx.mark = _nothing
    cuda.get_device_name = lambda device=None: "CPU"
    cuda.get_device_capability = lambda device=None: (8, 0)
    properties = types.SimpleNamespace(name="CPU", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1)
    cuda.get_device_properties = lambda device=None: properties
    cuda.memory_stats = lambda device=None: {}
    cuda.device_memory_used = lambda device=None: 0
    cuda.Stream, cuda.Event, cuda.stream = torch.cpu.Stream, torch.Event, torch.cpu.stream
    cuda.Stream.synchronize = _nothing  # torch.distributed.checkpoint calls it
    cuda.current_stream = cuda.default_stream = torch.cpu.current_stream


def _replace_generator() -> None:
    """Use one generator for the host and the "device"."""
    generator = torch.default_generator
    torch.cuda.default_generators = (generator,)
    random: Any
    for random in (torch.cuda, torch.cuda.random):
        random.get_rng_state = lambda device=None: generator.get_state()
        random.set_rng_state = lambda state, device=None: generator.set_state(state) and None
        random.get_rng_state_all = lambda: [generator.get_state()]
        random.set_rng_state_all = lambda states: generator.set_state(states[0]) and None
        random.manual_seed = random.manual_seed_all = lambda seed: generator.manual_seed(seed) and None
        random.initial_seed = generator.initial_seed
    iterate = torch.utils.data.DataLoader.__iter__

    def iterate_apart(self: Any) -> Any:
        state = generator.get_state()  # a new loader must not draw its seed from dropout's generator
        iterator = iterate(self)
        generator.set_state(state)
        return iterator

    torch.utils.data.DataLoader.__iter__ = iterate_apart  # type: ignore[method-assign]
