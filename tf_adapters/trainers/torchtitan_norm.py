"""TorchTitan's norm of all gradients, for which its ranks need not wait in two cases.

``clip_grad_norm_`` reduces the norm over the pipeline's ranks in every step, also with ``training.max_norm`` infinity,
which clips nothing. Then TorchTitan only logs the norm. It gets a tensor that waits when it is read. With
``optimizer_step`` "post_validated" the update does not wait for the norm either, and is made again if clipping was due.
Source: torchtitan/distributed/utils.py (``clip_grad_norm_``), torchtitan/train.py (``train_step``).
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch

from tf_adapters.hosts.late import LateNorms
from tf_adapters.overrides import Overrides

__all__ = ["late_norm", "meetings", "post_validate"]


def meetings(job: Any, post_validated: bool = False) -> tuple[str, ...]:
    """Return what makes the ranks of a TorchTitan job meet between steps."""
    if not _only_logged(job) and not post_validated:
        return (f"training.max_norm {job.training.max_norm:g}",)
    every = job.metrics.log_freq == 1
    return ("the norm of all gradients, which metrics.log_freq 1 logs in every step",) if every else ()


def late_norm(trainer: Any, job: Any, utils: Any, overrides: Overrides) -> LateNorms | None:
    """Replace ``clip_grad_norm_`` of TorchTitan's ``utils`` where nothing is clipped. Called on all ranks.

    Returns the norms, to be closed at the end; None where the host's function stays.
    """
    host = utils.clip_grad_norm_
    if not _only_logged(job) or "pp_mesh" not in inspect.signature(host).parameters:
        return None
    norms = LateNorms(trainer.parallel_dims.get_mesh("pp").get_group(), torch.device(trainer.device))

    @functools.wraps(host)
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, pp_mesh: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if pp_mesh is None or not math.isinf(max_norm) or norm_type != 2.0:
            return host(parameters, max_norm, norm_type, *args, pp_mesh=pp_mesh, **kwargs)  # type: ignore[no-any-return]
        return norms.norm(host(parameters, max_norm, norm_type, *args, pp_mesh=None, **kwargs))

    overrides.set(utils, "clip_grad_norm_", clip_grad_norm_)
    return norms


def post_validate(adapter: Any, utils: Any) -> None:
    """Let ``clip_grad_norm_`` of TorchTitan's ``utils`` clip through the adapter."""
    host = utils.clip_grad_norm_

    @functools.wraps(host)
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, pp_mesh: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if pp_mesh is None or norm_type != 2.0 or kwargs.get("ep_enabled"):
            return host(parameters, max_norm, norm_type, *args, pp_mesh=pp_mesh, **kwargs)  # type: ignore[no-any-return]
        return adapter.clip_grad_norm_(parameters, max_norm)  # type: ignore[no-any-return]

    adapter.overrides.set(utils, "clip_grad_norm_", clip_grad_norm_)


def _only_logged(job: Any) -> bool:
    return math.isinf(job.training.max_norm)
