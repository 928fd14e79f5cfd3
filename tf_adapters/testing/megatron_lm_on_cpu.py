"""Run an unedited Megatron-LM script without a GPU, to try a command line before a real run::

    torchrun --nproc-per-node 2 -m tf_adapters.testing.megatron_lm_on_cpu -m tf_adapters.megatron pretrain_gpt.py ...
    torchrun --nproc-per-node 2 -m tf_adapters.testing.megatron_lm_on_cpu pretrain_gpt.py ...

``megatron_on_cpu`` prepares Megatron-Core. This module replaces the extensions that Megatron-LM compiles at its start.
Give the script ``--transformer-impl local --distributed-backend gloo`` and no fused kernels
(``--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm``). With
``--transformer-engine`` before the script, Transformer Engine's own Python runs (``transformer_engine_on_cpu``).
Then leave ``--transformer-impl`` at its default, and add ``--attention-backend unfused``.
Run with Megatron-LM 0.16.1 (pretrain_gpt.py, pretrain_bert.py).
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from tf_adapters.testing import megatron_on_cpu, transformer_engine_on_cpu
from tf_adapters.testing.after_import import run_prepared

_ENGINE = "--transformer-engine"


def install(engine: bool = False) -> None:
    """Prepare this process for Megatron-LM, and with ``engine`` for Transformer Engine's layers in it."""
    if engine:
        transformer_engine_on_cpu.install()
    megatron_on_cpu.install()
    megatron_on_cpu.CHANGED["megatron.legacy.fused_kernels"] = {"load": lambda args: None}  # would compile CUDA code
    megatron_on_cpu.use_built_helpers()
    megatron_on_cpu.spawn_without_the_script()


if __name__ == "__main__":
    engine = sys.argv[1:2] == [_ENGINE]
    if engine:
        del sys.argv[1]
    run_prepared(partial(install, engine), __doc__)
    if torch.distributed.is_initialized():  # else gloo's threads may abort the process at its end
        torch.distributed.destroy_process_group()
