"""TorchTitan's norm of all gradients, for which its ranks need not wait if it is only logged.

``clip_grad_norm_`` reduces the norm over the pipeline's ranks in every step, also with ``training.max_norm`` infinity,
which clips nothing. Then TorchTitan only logs the norm. It gets a tensor that waits when it is read.
Source: torchtitan/distributed/utils.py (``clip_grad_norm_``), torchtitan/train.py (``train_step``).
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from tf_adapters.hosts.late import LateNorms
from tf_adapters.log import announce

_MESH = "pp_mesh"


def meetings(job: Any) -> tuple[str, ...]:
    """Return what makes the ranks of a TorchTitan job meet between steps."""
    if not _only_logged(job):
        return (f"training.max_norm {job.training.max_norm:g}",)
    every = job.metrics.log_freq == 1
    return ("the norm of all gradients, which metrics.log_freq 1 logs in every step",) if every else ()


def replace_norm(adapter: Any, trainer: Any, job: Any) -> None:
    """Replace TorchTitan's ``clip_grad_norm_`` if ranks need not wait for the norm. Called on all ranks."""
    utils = importlib.import_module("torchtitan.distributed.utils")
    if not _only_logged(job) or _MESH not in inspect.signature(utils.clip_grad_norm_).parameters:
        return
    norms = LateNorms(trainer.parallel_dims.get_mesh("pp").get_group(), torch.device(trainer.device))
    adapter.on_detach(norms.close)
    line = "training.max_norm is inf: the norm of all gradients is only logged, and no rank waits for it"
    announce(adapter.collectives.rank, line)

    def clip_grad_norm_(
        host: Callable[..., Any],
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        *args: Any,
        pp_mesh: Any = None,
        **kwargs: Any,
    ) -> Any:
        if pp_mesh is not None and norm_type == 2.0 and math.isinf(max_norm):
            return norms.norm(host(parameters, max_norm, norm_type, *args, pp_mesh=None, **kwargs))
        return host(parameters, max_norm, norm_type, *args, pp_mesh=pp_mesh, **kwargs)

    adapter.overrides.wrap(utils, "clip_grad_norm_", clip_grad_norm_)


def _only_logged(job: Any) -> bool:
    return math.isinf(job.training.max_norm)
