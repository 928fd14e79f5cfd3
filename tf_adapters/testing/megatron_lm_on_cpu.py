"""Run an unedited Megatron-LM script where there is no GPU, to try a command line out before it costs anything::

    torchrun --nproc-per-node 2 -m tf_adapters.testing.megatron_lm_on_cpu -m tf_adapters.megatron pretrain_gpt.py ...
    torchrun --nproc-per-node 2 -m tf_adapters.testing.megatron_lm_on_cpu pretrain_gpt.py ...

``cuda_stand_in`` answers for ``torch.cuda``; here is what Megatron-LM compiles or imports at its start whether it is
used or not. Give the script ``--transformer-impl local --distributed-backend gloo`` and no fused kernels
(``--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm``).
Seen to run: Megatron-LM 0.16.1 (pretrain_gpt.py, pretrain_bert.py).
"""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.util
import multiprocessing.spawn
import os
import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any

from tf_adapters.testing import cuda_stand_in

_CHANGED: dict[str, dict[str, Any]] = {
    "megatron.legacy.fused_kernels": {"load": lambda args: None},  # would compile CUDA code
    # Names that are missing without Transformer Engine, and are looked up even so.
    "megatron.core.models.bert.bert_layer_specs": {"bert_layer_with_transformer_engine_spec": None},
    "megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None},
}
_NEED_TRITON = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.transformer.moe.ops.paged_stash",
)
_HELPERS = "megatron.core.datasets.helpers_cpp"


class _AfterImport:
    """An import hook that sets attributes of a module right after its own code has run."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path) if name in _CHANGED else None
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_then_change(module: types.ModuleType) -> None:
                execute(module)
                vars(module).update(_CHANGED[name])

            spec.loader.exec_module = execute_then_change
        return spec


def install() -> None:
    """Prepare this process for a Megatron-LM script."""
    cuda_stand_in.install()
    sys.meta_path.insert(0, _AfterImport)
    if importlib.util.find_spec("triton") is None:
        for name in _NEED_TRITON:
            sys.modules[name] = _module_of_functions_that_answer_false(name)
    _use_built_helpers()
    _spawn_without_the_script()


def _module_of_functions_that_answer_false(name: str) -> types.ModuleType:
    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return lambda *args, **kwargs: False

    module = types.ModuleType(name)
    module.__getattr__ = attribute  # type: ignore[method-assign]
    return module


def _use_built_helpers() -> None:
    """A checkout runs make for its data helpers, which needs pybind11; the megatron-core wheel has them built."""
    pattern = f"megatron/core/datasets/helpers_cpp.cpython-3{sys.version_info[1]}-*.so"
    built = [file for folder in sys.path for file in glob.glob(os.path.join(folder, pattern))]
    if built:
        spec = importlib.util.spec_from_file_location(_HELPERS, built[0])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_HELPERS] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_HELPERS])
        _CHANGED["megatron.core.datasets.utils"] = {"compile_helpers": lambda: None}


def _spawn_without_the_script() -> None:
    """Checkpoints spawn a process, which would import the script again, and without any of this."""
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_without_main(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main_from")}

    multiprocessing.spawn.get_preparation_data = prepare_without_main


def main() -> None:
    """Run the script or ``-m module`` that the arguments name."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
    install()
    if arguments[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(arguments[0])), arguments
        runpy.run_path(sys.argv[0], run_name="__main__")
    import torch.distributed

    if torch.distributed.is_initialized():  # else gloo's threads may abort the process at its end
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
