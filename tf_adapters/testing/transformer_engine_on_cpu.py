"""Run Transformer Engine's own Python without a GPU, for experiments and tests.

Its modules, autograd functions and optimizers run unedited. Torch replaces the compiled extension
(``transformer_engine_kernels``), in bf16, fp16 and fp32. FP8, fused attention, fused RoPE, fused permutation and
userbuffers are not emulated: a call raises NotImplementedError, which names the kernel.
Run with transformer-engine 2.4.0, 2.10.0 and 2.20.2.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tf_adapters.testing import cuda_stand_in, megatron_on_cpu, transformer_engine_kernels
from tf_adapters.testing.after_import import AbsentTriton

__all__ = ["FOLDER", "available", "install"]

FOLDER = Path(sys.prefix) / "transformer_engine"
"""A further folder to search. On the ordinary path, Megatron-Core would use Transformer Engine in every test."""

_PACKAGES = "transformer-engine onnxscript onnx onnx-ir ml_dtypes nvdlfw-inspect"
_EXTENSION = "transformer_engine_torch"
_TYPES = "kByte=0 kInt32=2 kFloat32=4 kFloat16=5 kBFloat16=6 kFloat8E4M3=7 kFloat8E5M2=8 kFloat4E2M1=10"
_FORWARD = (
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT"
)
_BACKWARD = "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"


def available() -> bool:
    """Return whether there is a Transformer Engine to run, installed or in ``FOLDER``."""
    return importlib.util.find_spec("transformer_engine") is not None or FOLDER.exists()


def install() -> None:
    """Prepare this process for Transformer Engine, and for Megatron-Core with its layers.

    Call it before any import of either; once is enough.
    """
    if _EXTENSION in sys.modules or (torch.cuda.device_count() > 0 and not cuda_stand_in.installed()):
        return
    sys.path.append(str(FOLDER))
    if importlib.util.find_spec("transformer_engine") is None:
        raise ModuleNotFoundError(f"no transformer-engine: pip install --no-deps {_PACKAGES}")
    os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")  # otherwise it searches CUDA's libraries
    megatron_on_cpu.install()
    for name in megatron_on_cpu.WITHOUT_ENGINE:
        megatron_on_cpu.CHANGED.pop(name, None)
    megatron_on_cpu.CHANGED["transformer_engine.common"] = {"load_framework_extension": lambda framework: None}
    megatron_on_cpu.CHANGED["transformer_engine.pytorch.cpp_extensions"] = {"__getattr__": _absent}
    megatron_on_cpu.CHANGED["transformer_engine.pytorch.utils"] = {"canonicalize_device": _device}
    _replace_device()
    sys.modules[_EXTENSION] = _extension()


def _device(device: Any) -> torch.device:
    """Return the CPU for a device of any name or number, except "meta"."""
    named = isinstance(device, (str, torch.device)) and torch.device(device).type == "meta"
    return torch.device("meta" if named else "cpu")


def _replace_device() -> None:
    """Replace device functions that Transformer Engine calls in addition to those of ``cuda_stand_in``."""
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: True)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.version.cuda = torch.version.cuda or "12.8"
    if importlib.util.find_spec("triton") is None:
        torch.utils._triton.has_triton_package()  # torch caches the result, so it will not see the stand-in for Triton
        triton: Any = AbsentTriton(name="triton")
        sys.modules.update({"triton": triton, "triton.language": triton.language})
        for name in ("core", "standard"):
            sys.modules[f"triton.language.{name}"] = getattr(triton.language, name)


def _extension() -> types.ModuleType:
    module = types.ModuleType(_EXTENSION)
    number = {name: int(value) for name, _, value in (pair.partition("=") for pair in _TYPES.split())}
    vars(module).update(
        transformer_engine_kernels.answers(),
        DType=enum.IntEnum("DType", number),
        FP8FwdTensors=enum.IntEnum("FP8FwdTensors", _FORWARD.split(), start=0),
        FP8BwdTensors=enum.IntEnum("FP8BwdTensors", _BACKWARD.split(), start=0),
        NVTE_Fused_Attn_Backend=_attention_backends(),
        get_num_cublas_streams=lambda: 4,
        _num_cublas_streams=4,
        get_cublasLt_version=lambda: 120900,
        get_cudnn_version=lambda: 91200,
        get_stream_priority_range=lambda *_: (0, 0),
        device_supports_multicast=lambda *_: False,
        ubuf_built_with_mpi=lambda: False,
        get_fused_attn_backend=lambda *args, **kwargs: module.NVTE_Fused_Attn_Backend.NVTE_No_Backend,
        __getattr__=_absent,
    )
    return module


class _AttentionBackend(enum.IntEnum):
    """A backend of fused attention. From 2.20 on the extension also returns the reason for its absence."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self, "no kernel on a CPU"))


def _attention_backends() -> Any:
    kind: Any = _AttentionBackend
    backends = kind("NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2})
    backends.NVTE_F16_max512_seqlen = 0  # for older versions; newer ones check that they know all members
    return backends


class _Names(type):
    """A class in which every attribute exists, as a number: a stand-in for enumerations of the extension."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return int(vars(cls)[name])


@functools.cache
def _absent(name: str) -> Any:
    """Return a type of any name, or a function that raises NotImplementedError."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return _Names(name, (), {})

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} of Transformer Engine's compiled extension has no answer on a CPU")

    return kernel
