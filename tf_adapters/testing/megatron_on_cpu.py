"""Run Megatron-Core without GPU, Triton and Transformer Engine, for experiments and tests.

``cuda_stand_in`` replaces ``torch.cuda``. This module provides names that Megatron-Core always imports or looks up.
Run with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import multiprocessing.spawn
import os
import sys
import types
import typing
from typing import Any
from unittest.mock import Mock

import torch.distributed as dist

from tf_adapters.testing import cuda_stand_in
from tf_adapters.testing.after_import import ChangedImports, Run

WITHOUT_ENGINE: dict[str, dict[str, Any]] = {  # names that are missing without Transformer Engine
    "megatron.core.models.bert.bert_layer_specs": {"bert_layer_with_transformer_engine_spec": None},
    "megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None},
}
CHANGED = dict(WITHOUT_ENGINE)
"""Attributes to set in a module of Megatron when it is imported."""

_NEED_TRITON = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.transformer.moe.ops.paged_stash",
)

_HELPERS = "megatron.core.datasets.helpers_cpp"
_FUSED_KERNEL = "fused_weight_gradient_mlp_cuda"


class _AnswersFalse(Mock):
    """A module of functions that all return False."""

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        return False


def _set_names(run: Run, module: types.ModuleType) -> None:
    run(module)
    vars(module).update(CHANGED[module.__name__])


_IMPORTS = ChangedImports(lambda name: _set_names if name in CHANGED else None)


def install() -> None:
    """Prepare this process for Megatron-Core. Call it before any import of Megatron; once is enough."""
    if _IMPORTS in sys.meta_path:
        return
    cuda_stand_in.install()
    sys.meta_path.insert(0, _IMPORTS)
    _send_copies()
    stand_in_for_apex()
    if not hasattr(typing, "override"):  # 0.19 assumes Python 3.12
        vars(typing)["override"] = lambda function: function
    if importlib.util.find_spec("triton") is None:
        for name in _NEED_TRITON:
            sys.modules[name] = _AnswersFalse(name=name)


def use_built_helpers() -> None:
    """Use the data helpers of the megatron-core wheel. A checkout would build them, which needs pybind11."""
    pattern = f"megatron/core/datasets/helpers_cpp.cpython-3{sys.version_info[1]}-*.so"
    built = [file for folder in sys.path for file in glob.glob(os.path.join(folder, pattern))]
    if built:
        spec = importlib.util.spec_from_file_location(_HELPERS, built[0])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_HELPERS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_HELPERS])
        CHANGED["megatron.core.datasets.utils"] = {"compile_helpers": lambda: None}


def spawn_without_the_script() -> None:
    """Keep the process that checkpoints spawn from importing the script again, without these stand-ins."""
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_without_main(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main_from")}

    multiprocessing.spawn.get_preparation_data = prepare_without_main


def _send_copies() -> None:
    """Send copies: interleaved pipelines free an output right after isend, but gloo reads it later."""
    host_isend: Any = dist.isend

    @functools.wraps(host_isend)
    def isend(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return host_isend(tensor.clone(), *args, **kwargs)

    dist.isend = dist.distributed_c10d.isend = isend


def stand_in_for_apex() -> None:
    """Without Apex, answer the kernel that ``gradient_accumulation_fusion`` calls with a product of torch.

    It adds a weight's gradient to ``main_grad``. It also works on a GPU.
    """
    if _FUSED_KERNEL in sys.modules or importlib.util.find_spec(_FUSED_KERNEL) is not None:
        return

    def add_product(inputs: Any, gradient: Any, total: Any) -> None:
        total.add_(gradient.t() @ inputs)

    module = types.ModuleType(_FUSED_KERNEL)
    vars(module).update(wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product)
    sys.modules[_FUSED_KERNEL] = module
