"""Run an unedited Megatron-LM script where there is no GPU, to try a command line out before it costs anything::

    torchrun --nproc-per-node 2 -m tf_adapters.testing.megatron_lm_on_cpu -m tf_adapters.megatron pretrain_gpt.py ...
    torchrun --nproc-per-node 2 -m tf_adapters.testing.megatron_lm_on_cpu pretrain_gpt.py ...

``megatron_on_cpu`` is for Megatron-Core; here is what Megatron-LM compiles at its start whether it is used or not.
Give the script ``--transformer-impl local --distributed-backend gloo`` and no fused kernels
(``--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm``).
Seen to run: Megatron-LM 0.16.1 (pretrain_gpt.py, pretrain_bert.py).
"""

from __future__ import annotations

import glob
import importlib.util
import multiprocessing.spawn
import os
import runpy
import sys
from typing import Any

from tf_adapters.testing import megatron_on_cpu

_HELPERS = "megatron.core.datasets.helpers_cpp"


def install() -> None:
    """Prepare this process for a Megatron-LM script."""
    megatron_on_cpu.install()
    megatron_on_cpu.CHANGED["megatron.legacy.fused_kernels"] = {"load": lambda args: None}  # would compile CUDA code
    _use_built_helpers()
    _spawn_without_the_script()


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
        megatron_on_cpu.CHANGED["megatron.core.datasets.utils"] = {"compile_helpers": lambda: None}


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
