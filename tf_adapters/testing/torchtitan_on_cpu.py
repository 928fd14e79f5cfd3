"""Run an unedited TorchTitan job without a GPU, to try a command line before a real run::

    torchrun --nproc-per-node 2 -m tf_adapters.testing.torchtitan_on_cpu -m tf_adapters.trainers.torchtitan ...
    torchrun --nproc-per-node 2 -m tf_adapters.testing.torchtitan_on_cpu -m torchtitan.train ...

TorchTitan uses the accelerator that torch finds, or "cuda". Here it is the CPU, over gloo. Figures of device memory are
0. Triton can be imported but not run. FlexAttention is computed by plain products.
Run with TorchTitan 0.2.2 (torch 2.13), 0.3.0 (torch 2.15).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import Any

import torch
import torch._utils

from tf_adapters.testing.after_import import AbsentTriton, Change, ChangedImports, Run, accept_device_ids, run_prepared


def install() -> None:
    """Prepare this process for TorchTitan, before it is imported."""
    vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    of_a_device: dict[str, Any] = {
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=memory_bytes),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, function in of_a_device.items():
        vars(torch.cpu).setdefault(name, function)
    accept_device_ids()
    sys.meta_path.insert(0, ChangedImports(_CHANGED.get))


def _with_triton(run: Run, module: types.ModuleType) -> None:
    """Import with a stand-in for Triton that other modules do not see: torch works without Triton."""
    if importlib.util.find_spec("triton") is not None:
        run(module)
        return
    triton: Any = AbsentTriton()
    sys.modules.update({"triton": triton, "triton.language": triton.language})
    try:
        run(module)
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def _with_plain_attention(run: Run, module: types.ModuleType) -> None:
    """Replace FlexAttention, which has no backward on a CPU and would compile its masks with a C++ compiler."""
    from torch.nn.attention.flex_attention import create_block_mask

    run(module)
    flex = vars(module)["FlexAttention"]
    if hasattr(flex, "_compiled_flex_attn"):
        flex._compiled_flex_attn = staticmethod(_attention)
    if hasattr(module, "_compiled_create_block_mask"):
        vars(module)["_compiled_create_block_mask"] = create_block_mask


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Compute FlexAttention without score_mod by plain products: (batch, heads, tokens, width)."""
    from torch.nn.attention.flex_attention import create_mask

    if options.get("score_mod") is not None:
        raise NotImplementedError("a score_mod on a CPU")
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (options.get("scale") or q.shape[-1] ** -0.5)
    blocks = options.get("block_mask")
    if blocks is not None:
        size = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        scores = scores.masked_fill(~create_mask(blocks.mask_mod, *size, device="cpu"), float("-inf"))
    result = scores.softmax(-1) @ v
    if options.get("return_aux") is None:
        return result
    return result, types.SimpleNamespace(lse=scores.logsumexp(-1))


_CHANGED: dict[str, Change] = {
    "torchtitan.models.moe.kernels": _with_triton,
    "torchtitan.models.common.attention": _with_plain_attention,
}
"""Modules of TorchTitan that a CPU cannot run as they are."""


if __name__ == "__main__":
    run_prepared(install, __doc__)
