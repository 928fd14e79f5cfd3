"""Post-validated updates in DeepSpeed's pipeline engine, with ZeRO stage 1 or BF16_Optimizer.

Both optimizers compute the norm of all gradients inside their step. They do so even if nothing is clipped, because an
update may be skipped if the norm is no number. Here the host's step gets a norm of zero, so that it neither clips nor
skips. The host's own sums of squares are still computed. Their totals over all ranks arrive later.
Source: deepspeed/runtime/zero/stage_1_and_2.py, bf16_optimizer.py, utils.py and engine.py, ``_take_model_step``.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime import utils as host
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.deepspeed.optimizers import HeldParameters
from tf_adapters.hosts.adapter import HostAdapter
from tf_adapters.hosts.late import LateSums, LateTensor
from tf_adapters.hosts.post_validation import PostValidation, Settles
from tf_adapters.hosts.support import Problem, first_problem, missing_name
from tf_adapters.overrides import Overrides
from tf_adapters.training.controller import Controller

_UTILS = ("clip_tensors_by_global_norm", "combine_grad_norm_groups", "dist", "get_global_norm_of_tensors")
_ZERO_NAMES = (
    *("_model_parallel_all_reduce", "check_grad_overflow", "check_overflow", "scaled_global_norm"),
    *("unscale_and_clip_grads", "update_lp_params"),
)
_BF16_NAMES = ("clip_grad", "get_grads_for_norm", "mpu", "norm_type", "update_lp_params")
_STATE = ("load_module_state_dict", "module_state_dict", "save_16bit_model")
"""Methods of the engine, called on all ranks, that read or replace what an update writes."""


class DeepSpeedPostValidation(PostValidation):
    """The update of one engine. If a parameter was frozen for a whole step, the ``holder`` keeps it from changing."""

    def __init__(self, engine: Any, controller: Controller) -> None:
        super().__init__(engine.grid.get_model_parallel_group(), torch.device(engine.device), controller)
        self._engine, self._outer = engine, engine.optimizer
        self._inner: torch.optim.Optimizer = engine.basic_optimizer
        self._norm: LateTensor | None = None
        self._held: tuple[torch.nn.Parameter, ...] = ()
        self._scheduler: Any = None  # its state before the update
        self._has_stepped = False
        self._max_norm = float(engine.gradient_clipping())

    def install(self, adapter: HostAdapter, holder: HeldParameters) -> None:
        """Change the optimizer's step: it no longer waits for the norm, and it keeps copies.

        The last update becomes final before a state is saved or loaded. Install the hooks of the ``holder`` after this.
        """
        self._holder = holder
        engine = self._engine

        def step(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # The first step of an optimizer makes the state that the host refers to afterwards.
            if not self.speculates(self._has_stepped and adapter.repeatable):
                self._has_stepped = True
                return run(*args, **kwargs)
            self._held, self._scheduler = holder.held, _state_of(engine.lr_scheduler)
            with self._without_meeting():
                result = run(*args, **kwargs)
            self._outer._global_grad_norm = self._norm
            return result

        adapter.overrides.wrap(self._outer, "step", step)
        adapter.on_detach(self._inner.register_step_pre_hook(self._keep).remove)
        adapter.settle_before(engine, _STATE)
        alone = Settles(lambda: None if adapter.in_batch or self.making_again else self._settle_alone())
        for register in ("register_state_dict_pre_hook", "register_load_state_dict_pre_hook"):
            for owner in (engine.module, self._inner):
                adapter.on_detach(getattr(owner, register)(alone).remove)

    def settle(self) -> bool:
        if not self.pending:
            return False
        self._holder.held = self._held
        try:
            made_again = super().settle()
        finally:
            self._holder.held = self._held = ()
        if made_again:  # on all replicas
            self._outer.update_lp_params()
        return made_again

    def _settle_alone(self) -> None:
        """Settle where other replicas may not be. Raises RuntimeError if the update must be made again with them."""
        replicas = self._engine.grid.get_data_parallel_world_size()
        if replicas > 1 and self._square is not None and self.is_due(self._square.arrive()):
            raise RuntimeError(
                "timely_freeze: the last update has to be made again, on all replicas of this stage, before weights "
                "are read; call engine.timely_freeze.settle() on all ranks first"
            )
        self.settle()

    def is_due(self, square: torch.Tensor) -> bool:
        norm = self.total_norm(square)
        return not bool(torch.isfinite(norm)) or self._clips(norm)

    def is_skipped(self, square: torch.Tensor) -> bool:
        return self._skips_overflow() and not bool(torch.isfinite(self.total_norm(square)))

    def after_skip(self) -> None:
        engine = self._engine
        engine.skipped_steps += 1
        engine._step_applied = False
        self._outer.overflow = True
        if self._scheduler is not None:
            state, last_lr = self._scheduler
            engine.lr_scheduler.load_state_dict(state)
            if last_lr is not None:
                engine.lr_scheduler._last_lr = last_lr

    @abstractmethod
    def total_norm(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the host's norm of all gradients from the sums of squares; infinity if it is no number."""

    @abstractmethod
    def _clips(self, norm: torch.Tensor) -> bool:
        """Return whether the host changes gradients by this norm."""

    def _skips_overflow(self) -> bool:
        """Return whether the host makes no update if the norm is no number."""
        return True

    @abstractmethod
    def _without_meeting(self) -> AbstractContextManager[None]:
        """Return a context in which the host's step computes this rank's sums of squares only.

        The step goes on with a norm of zero.
        """

    def _expect_squares(self, own: list[torch.Tensor]) -> None:
        sums: LateSums = self._norms.sums(own)
        self._square, self._norm = sums, sums.late(self.total_norm)

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = list(optimizer.param_groups)  # ZeRO steps one at a time

        def step() -> None:
            with Overrides() as inside:
                inside.set(optimizer, "param_groups", groups)
                optimizer.step()

        self.before_update(optimizer, step)


class _Zero(DeepSpeedPostValidation):
    """With ZeRO's optimizer, which has one norm for each parameter group.

    If it checks for overflow, the first of its sums says on how many ranks a gradient is no number.
    """

    def total_norm(self, squares: torch.Tensor) -> torch.Tensor:
        if self._outer.check_grad_overflow:
            overflows, squares = squares[0], squares[1:]
            if bool(overflows):
                return torch.full_like(overflows, float("inf"))
        norm: torch.Tensor = host.combine_grad_norm_groups(list(squares.pow(0.5)))
        return norm

    def clip_again(self, parameters: list[torch.nn.Parameter], square: torch.Tensor) -> None:
        self._outer.unscale_and_clip_grads([p.grad for p in parameters], self.total_norm(square))

    def _clips(self, norm: torch.Tensor) -> bool:
        return self._max_norm > 0.0 and bool((norm + 1e-6) / self._max_norm > 1.0)

    def _skips_overflow(self) -> bool:
        return bool(self._outer.dtype != torch.bfloat16 or self._outer.check_grad_overflow)

    @contextmanager
    def _without_meeting(self) -> Iterator[None]:
        outer, own = self._outer, list[torch.Tensor]()
        host_check, host_norm = outer.check_overflow, outer.scaled_global_norm

        def check_overflow(*args: Any, **kwargs: Any) -> None:
            host_check(*args, **kwargs)
            outer.overflow = False  # that of the other ranks is not known yet

        def scaled_global_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
            host_norm(*args, **kwargs)
            self._expect_squares(own)
            return torch.zeros((), device=outer.device)

        with Overrides() as overrides:
            overrides.set(outer, "_model_parallel_all_reduce", lambda tensor, op: own.append(tensor.clone()))
            overrides.set(outer, "check_overflow", check_overflow)
            overrides.set(outer, "scaled_global_norm", scaled_global_norm)
            yield


class _BF16(DeepSpeedPostValidation):
    """With BF16_Optimizer, which has one norm."""

    def total_norm(self, squares: torch.Tensor) -> torch.Tensor:
        norm = squares[0].pow(0.5)
        return torch.where(norm.isfinite(), norm, torch.full_like(norm, float("inf")))

    def clip_again(self, parameters: list[torch.nn.Parameter], square: torch.Tensor) -> None:
        if self._max_norm > 0.0:
            gradients = [p.grad for p in parameters]
            host.clip_tensors_by_global_norm(gradients, max_norm=self._max_norm, global_norm=self.total_norm(square))

    def _clips(self, norm: torch.Tensor) -> bool:
        return self._max_norm > 0.0 and bool(self._max_norm / (norm + 1e-6) < 1.0)

    @contextmanager
    def _without_meeting(self) -> Iterator[None]:
        outer, mpu, host_gradients = self._outer, self._outer.mpu, self._outer.get_grads_for_norm

        def get_grads_for_norm() -> tuple[list[torch.Tensor], dict[str, Any]]:
            gradients, of_experts = host_gradients()
            own: list[torch.Tensor] = []
            keep = {"all_reduce": lambda tensor, *_, **__: own.append(tensor.clone())}
            with Overrides() as inside:  # for this module of the host only
                inside.set(host, "dist", SimpleNamespace(**(vars(host.dist) | keep)))
                host.get_global_norm_of_tensors(input_tensors=gradients, mpu=mpu, norm_type=outer.norm_type)
            self._expect_squares(own)
            return [torch.zeros(1, device=self._engine.device)], of_experts

        with Overrides() as overrides:
            overrides.set(outer, "get_grads_for_norm", get_grads_for_norm)
            overrides.set(outer, "mpu", None)  # no rank is asked for its share
            overrides.set(outer, "clip_grad", 0.0)
            yield


def _computes_norm(engine: Any) -> bool:
    """Return whether the optimizer's step computes the norm of all gradients."""
    return engine.optimizer is not engine.basic_optimizer and getattr(engine.optimizer, "compute_grad_norm", True)


def waits_for_norm(engine: Any, settings: TimelyFreezeConfig) -> bool:
    """Return whether ranks wait for the norm of all gradients, and would not with post-validated updates."""
    waits = settings.could_post_validate and _computes_norm(engine)
    return bool(waits and post_validation_problem(engine) is None)


def post_validation_of(
    engine: Any, settings: TimelyFreezeConfig, controller: Controller
) -> DeepSpeedPostValidation | None:
    """Return the validation of an engine; None if the settings do not ask for it, or no norm is computed."""
    if not (settings.post_validates and _computes_norm(engine)):
        return None
    return (_BF16 if isinstance(engine.optimizer, BF16_Optimizer) else _Zero)(engine, controller)


def post_validation_problem(engine: Any) -> Problem:
    """Return a problem if an update cannot be made again, or forwards cannot run again."""
    outer = engine.optimizer
    if outer is engine.basic_optimizer:
        return (
            "optimizer_step post_validated needs ZeRO stage 1 or bf16's optimizer: ZeRO stage 0 in fp32 clips by the "
            'first stage\'s norm alone; use "zero_optimization": {"stage": 1}'
        )
    is_bf16 = isinstance(outer, BF16_Optimizer)
    problem = (
        missing_name(outer, _BF16_NAMES if is_bf16 else _ZERO_NAMES)
        or missing_name(host, _UTILS, called="deepspeed.runtime.utils")
        or first_problem(
            {
                "gradients are accumulated in bf16": is_bf16 and outer.grad_acc_dtype != torch.float32,
                "the optimizer scales gradients": not is_bf16 and float(outer.loss_scale) != 1.0,
                "the norm is not the 2-norm": is_bf16 and outer.norm_type != 2,
                "dynamic_shape is True": bool(engine.dynamic_shape),
            }
        )
    )
    return problem and f"{problem}, with which optimizer_step post_validated was not checked"


def _state_of(scheduler: Any) -> tuple[Any, Any] | None:
    """Return the state of a learning-rate scheduler, and its last rates if it names them."""
    if scheduler is None:
        return None
    return copy.deepcopy(scheduler.state_dict()), copy.copy(getattr(scheduler, "_last_lr", None))
