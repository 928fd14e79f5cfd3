"""Post-validated updates in Megatron-Core: clipping by the norm of all gradients, and forwards that run again.

Source: megatron/core/optimizer/optimizer.py (``ChainedOptimizer.step``), clip_grads.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import clip_grads

from tf_adapters.hosts.adapter import HostAdapter
from tf_adapters.hosts.late import LateTensor
from tf_adapters.hosts.post_validation import PostValidation
from tf_adapters.hosts.support import Problem, first_problem
from tf_adapters.megatron.chunks import device_of
from tf_adapters.megatron.late_norm import own_norm, step_statistics_are_equal
from tf_adapters.megatron.optimizers import inner_of, leaves
from tf_adapters.training.controller import Controller

_STATE = (
    *("save_parameter_state", "sharded_state_dict", "state_dict", "state_dict_for_save_checkpoint"),
    *("load_parameter_state", "load_state_dict", "reload_model_params"),
)
"""Methods of optimizers and model chunks that read or replace what an update writes."""


class MegatronPostValidation(PostValidation):
    """Clips as a chained optimizer of Megatron does, with its ``clip_grad``."""

    def __init__(self, optimizer: Any, modules: Sequence[torch.nn.Module], controller: Controller) -> None:
        self.optimizer, self._optimizers, self._device = optimizer, optimizer.chained_optimizers, device_of(modules)
        super().__init__(self._optimizers[0].get_grad_stats_parallel_group(), self._device, controller)
        self._max_norm = float(optimizer.config.clip_grad)
        self.norm: LateTensor | None = None

    def expected_norm(self) -> float:
        """Stand for the optimizer's ``get_grad_norm``: expect the norm, and return one by which nothing is clipped."""
        self.norm = self.expect(own_norm(self._optimizers, self._device))
        return 0.0

    def is_due(self, square: torch.Tensor) -> bool:
        return self._max_norm / (_root(square) + 1.0e-6) < 1.0

    def clip_again(self, parameters: list[torch.nn.Parameter], square: torch.Tensor) -> None:
        if parameters:
            clip_grads.clip_grad_by_total_norm_fp32(parameters, max_norm=self._max_norm, total_norm=_root(square))


def install(validation: MegatronPostValidation, adapter: HostAdapter, owners: Iterable[torch.nn.Module]) -> None:
    """Replace the optimizer's norm, keep copies before its updates, and settle before a state is saved or loaded.

    ``owners`` are the modules whose state may be saved or loaded.
    """
    optimizer = validation.optimizer

    def get_grad_norm(host_norm: Callable[[], Any]) -> Any:
        return validation.expected_norm() if validation.speculates(adapter.repeatable) else host_norm()

    adapter.overrides.wrap(optimizer, "get_grad_norm", get_grad_norm)
    for leaf in leaves(optimizer):
        keep = functools.partial(validation.before_update, step=leaf.step_with_ready_grads)
        hook = inner_of(leaf).register_step_pre_hook(lambda given, *_, keep=keep: keep(given))
        adapter.on_detach(hook.remove)
    for owner in (optimizer, *owners):
        adapter.settle_before(owner, _STATE)


def post_validation_problem(chunks: Sequence[Any], optimizer: Any, config: Any) -> Problem:
    """Return a problem if an update cannot be made again, or forwards cannot run again."""
    of_leaves = [leaf for leaf in leaves(optimizer) if hasattr(leaf, "config")]
    ddp = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    problem = first_problem(
        {
            "the optimizer is not Megatron's chained one, or has fp16's loss scale": not step_statistics_are_equal(
                optimizer
            ),
            "use_precision_aware_optimizer is True": any(
                getattr(leaf.config, "use_precision_aware_optimizer", False) for leaf in of_leaves
            ),
            "gradients are clipped in groups": hasattr(optimizer, "_compute_grad_norms_by_group"),
            "overlap_param_gather is True": any(getattr(of, "overlap_param_gather", False) for of in ddp),
            "fp8 is set, and forwards change its scales": bool(getattr(config, "fp8", None)),
            "num_moe_experts is set, and forwards add to its losses": bool(getattr(config, "num_moe_experts", None)),
        }
    )
    return problem and f"{problem}, with which optimizer_step post_validated was not checked"


def _root(square: torch.Tensor) -> float:
    return math.sqrt(float(square.item()))
