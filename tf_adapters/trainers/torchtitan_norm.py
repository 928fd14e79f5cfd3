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
from collections.abc import Callable
from typing import Any

import torch

from tf_adapters.hosts.late import LateNorms
from tf_adapters.hosts.support import refuse
from tf_adapters.overrides import Overrides

__all__ = ["late_norm", "meetings", "post_validate"]

_MESH = "pp_mesh"
_NORM_TYPE = 2.0


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
    if not _only_logged(job) or not _reduces_over_pipeline(host):
        return None
    norms = LateNorms(trainer.parallel_dims.get_mesh("pp").get_group(), torch.device(trainer.device))

    def late(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        if not math.isinf(max_norm):
            return None
        return norms.norm(host(parameters, max_norm, _NORM_TYPE, *args, pp_mesh=None, **kwargs))

    overrides.set(utils, "clip_grad_norm_", _norms_of_pipeline_by(host, late))
    return norms


def post_validate(adapter: Any, utils: Any) -> None:
    """Let ``clip_grad_norm_`` of TorchTitan's ``utils`` clip through the adapter. Called on all ranks.

    Raises UnsupportedError if this TorchTitan's function does not say over which pipeline it reduces.
    """
    host = utils.clip_grad_norm_
    if not _reduces_over_pipeline(host):
        refuse(
            f"optimizer_step post_validated needs the argument {_MESH} of torchtitan's clip_grad_norm_; use "
            'optimizer_step "synchronous"'
        )

    def clipped(parameters: Any, max_norm: float, *_: Any, **kwargs: Any) -> torch.Tensor | None:
        return None if kwargs.get("ep_enabled") else adapter.clip_grad_norm_(parameters, max_norm)

    adapter.overrides.set(utils, "clip_grad_norm_", _norms_of_pipeline_by(host, clipped))


def _reduces_over_pipeline(host: Callable[..., Any]) -> bool:
    return _MESH in inspect.signature(host).parameters


def _norms_of_pipeline_by(host: Callable[..., Any], ours: Callable[..., torch.Tensor | None]) -> Callable[..., Any]:
    """Wrap the host's function: ``ours`` is asked for 2-norms over a pipeline; None leaves the call to the host."""

    @functools.wraps(host)
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, pp_mesh: Any = None, **kwargs: Any
    ) -> Any:
        if pp_mesh is not None and norm_type == _NORM_TYPE:
            norm = ours(parameters, max_norm, *args, **kwargs)
            if norm is not None:
                return norm
        return host(parameters, max_norm, norm_type, *args, pp_mesh=pp_mesh, **kwargs)

    return clip_grad_norm_


def _only_logged(job: Any) -> bool:
    return math.isinf(job.training.max_norm)
