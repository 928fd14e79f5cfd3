"""A batch in the order of a plan, driven by Megatron's own function of the schedule.

The host's function requests forwards and backwards in its own order. At each request, the plan's row runs up to the
requested action, with the host's own forward and backward steps (``hosts.runner``). The host gets stand-ins for
tensors, and its sends and receives are skipped. Timers, token counts, losses and the end of the batch stay the host's.
Source: megatron/core/pipeline_parallel/schedules.py and p2p_communication.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as host
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config, get_model_type

from megatron_patches.forward_backward import Batch
from tf_adapters.errors import UnsupportedError
from tf_adapters.hosts.links import Links, Message
from tf_adapters.hosts.runner import RowRunner
from tf_adapters.hosts.support import refuse
from tf_adapters.megatron.chunks import Chunk, device_of
from tf_adapters.megatron.placement import PipelinePosition
from tf_adapters.megatron.support import config_problem
from tf_adapters.overrides import Overrides
from tf_adapters.schedule.deferral import most_held
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule
from tf_adapters.schedule.messages import Receives

Run = Callable[[Callable[[], Any], Action], Any]
"""Runs the host's forward or backward of an action and returns its result."""


class _InFlight(NamedTuple):
    """The tensors of a microbatch in a stage between its forward and its backward."""

    inputs: list[Any]
    outputs: list[Any]


class _Arrived:
    """A stand-in for a transfer that the host began: it has nothing to wait for."""

    def wait(self) -> None:
        pass


class OrderedBatch:
    """Megatron's computations of one rank in one batch (``hosts.runner.Computations``).

    Args:
        batch: the host's arguments.
        order: the order of all ranks. Without backwards, the batch only evaluates.
        chunks: the rank's model chunks, in Megatron's order.
        position: the rank's position in the pipeline.
        run: runs the host's forward or backward of an action.
        compute: computes the weight gradients of a W; its flag says whether they are the last ones of their stage.

    Raises UnsupportedError if chunks in a V cannot run, since the host's transfers cannot be skipped.
    """

    def __init__(
        self,
        batch: Batch,
        order: PipelineSchedule,
        chunks: Sequence[Chunk],
        *,
        position: PipelinePosition,
        receives: Receives,
        links: Links,
        run: Run,
        compute: Callable[[Action, bool], None],
    ) -> None:
        models = [chunk.model for chunk in chunks]
        config = get_model_config(models[0])
        if position.in_v:
            _check_replaceable(batch, links.group)
        self._batch, self._device = batch, device_of(models)
        self._stages, self._last_stage = position.stages, order.num_stages - 1
        self._gradients = {chunk.stage: chunk.gradients for chunk in chunks}
        self._last, self._reduces_early = order.num_microbatches - 1, _reduces_early(config, position)
        self._host_run, self._compute = run, compute
        self._order, self._links = order, links
        self._runner = RowRunner(order, receives, links.rank, host=self)
        self._window = most_held(order.ranks[links.rank])
        self._forward_step: Callable[..., Any] = host.forward_step
        self._arguments: dict[str, Any] = {}  # arguments of the host's first forward
        self._of_backward: dict[str, Any] = {}
        # In a V a rank may receive before its host has named the shape.
        self._input_shape: Any = _input_shape(batch, config) if position.in_v else None
        self._output_shapes: dict[int, torch.Size] = {}  # by stage
        self._forwards = 0  # number that have run
        self._in_flight: dict[tuple[int, int], _InFlight] = {}  # by stage and microbatch
        self._tokens: dict[tuple[int, int], Any] = {}
        self._passed: dict[Action, torch.Tensor] = {}  # inputs, by the action of this or another rank that takes them

    @contextmanager
    def without_transfers(self) -> Iterator[None]:
        """Run the host's function inside, and skip its own sends and receives."""

        def communicate(
            communicator: Any, *, tensor_shape: Any, wait_on_reqs: bool = True, **asked: Any
        ) -> tuple[None, None, dict[str, Any] | None]:
            if tensor_shape is not None and (asked["recv_prev"] or self._input_shape is None):
                self._input_shape = tensor_shape
            return None, None, None if wait_on_reqs else _handles(**asked)

        with Overrides() as overrides:
            overrides.set(P2PCommunicator, "_communicate", communicate)
            yield

    def close(self) -> None:
        """Drop all tensors. The batch and its runner refer to each other, and Python may never collect them."""
        vars(self).clear()

    # --- what the host requests --------------------------------------------------------------------------------

    def answer_forward(self, call: functools.partial[Any], stage: int, microbatch: int) -> tuple[Any, Any]:
        """Answer the host's request for a forward with a stand-in for its output and its number of tokens."""
        if not self._arguments:
            self._take_arguments(call)
        self._runner.run_until(Action(stage, Kind.FORWARD, microbatch))
        output = torch.empty(1)
        takes_list = isinstance(self._arguments["input_tensor"], list)
        return [output] if takes_list else output, self._tokens.pop((stage, microbatch))

    def answer_backward(self, stage: int, microbatch: int) -> Any:
        """Answer the host's request for a backward with a stand-in for the gradient of its input."""
        self._runner.run_until(Action(stage, Kind.BACKWARD, microbatch))
        return [None] if isinstance(self._arguments["input_tensor"], list) else None

    def finish(self, stage: int | None = None) -> None:
        """Run what is left of one stage, or of all."""
        if stage is None:
            self._runner.finish()
        else:
            self._runner.finish_stage(stage)

    def _take_arguments(self, call: functools.partial[Any]) -> None:
        self._forward_step = call.func
        self._arguments = inspect.signature(call.func).bind(*call.args, **call.keywords).arguments
        self._of_backward = {"config": self._arguments["config"]}
        if "model_type" in inspect.signature(host.backward_step).parameters:  # before 0.17
            self._of_backward["model_type"] = get_model_type(self._arguments["model"])

    # --- what the runner requests ------------------------------------------------------------------------------

    def begin_receive(self, action: Action) -> Message:
        forward = action.kind is Kind.FORWARD
        shape = self._input_shape if forward else self._output_shapes[action.stage]
        dtype = self._arguments["config"].pipeline_dtype
        buffer = torch.empty(shape, dtype=dtype, device=self._device, requires_grad=forward)
        return [self._links.receive(buffer, self._order.home[self._order.source[action].stage])]

    def end_receive(self, action: Action, message: Message) -> None:
        (transfer,) = message
        self._passed[action] = transfer.wait()

    def compute(self, action: Action) -> None:
        if action.kind is Kind.WEIGHT_GRAD:
            self._compute(action, action.microbatch == self._last)
            return
        forward, received = action.kind is Kind.FORWARD, self._passed.pop(action, None)
        result = self._forward(action, received) if forward else self._backward(action, received)
        target = self._order.target.get(action)
        if target is None:
            return
        self._passed[target] = result.detach().requires_grad_() if forward else result
        if forward:
            host.deallocate_output_tensor(result, self._arguments["config"].deallocate_pipeline_outputs)

    def send(self, action: Action) -> Message:
        target = self._order.target[action]
        return [self._links.send(self._passed.pop(target), self._order.home[target.stage])]

    def _forward(self, action: Action, received: torch.Tensor | None) -> Any:
        """Run a forward on its input (None on the first stage). Return its output."""
        inputs = [received]
        call = functools.partial(self._forward_step, **{**self._arguments, **self._arguments_of(action, inputs)})
        place = action.stage, action.microbatch
        outputs, self._tokens[place] = self._run(call, action)
        self._forwards += 1
        self._output_shapes[action.stage] = outputs[0].shape
        if not self._batch.forward_only:
            self._in_flight[place] = _InFlight(inputs, outputs)
        return outputs[0]

    def _backward(self, action: Action, received: torch.Tensor | None) -> Any:
        """Run a B or I on the gradient of the output (None on the last stage). Return the gradient of the input."""
        of = self._in_flight.pop((action.stage, action.microbatch))
        call = functools.partial(
            host.backward_step,
            input_tensor=of.inputs,
            output_tensor=of.outputs,
            output_tensor_grad=[received],
            **self._of_backward,
        )
        (gradient,) = self._run(call, action)
        return gradient

    def _run(self, call: Callable[[], Any], action: Action) -> Any:
        """Run a forward or backward. The gradients of the last microbatch are reported as such."""
        with self._gradients[action.stage].reported(self._reduces_early and action.microbatch == self._last):
            return self._host_run(call, action)

    def _arguments_of(self, action: Action, inputs: list[Any]) -> dict[str, Any]:
        """Return the arguments of an action's forward that differ from those of the host's first forward."""
        changed: dict[str, Any] = {"input_tensor": inputs, "current_microbatch": action.microbatch}
        if action.microbatch:
            changed["is_first_microbatch"] = False
        if len(self._stages) > 1:
            chunk = self._stages.index(action.stage)
            changed["model"], changed["data_iterator"] = self._batch.model[chunk], self._batch.data_iterator[chunk]
            changed["vp_stage"], changed["is_last_stage"] = chunk, action.stage == self._last_stage
            if not self._batch.forward_only:  # else the host knows whether this evaluation is the first one
                changed["is_first_microbatch"] = action.microbatch == 0
        recomputed_from = self._arguments["config"].num_microbatches_with_partial_activation_checkpoints
        if recomputed_from is not None:
            changed["checkpoint_activations_microbatch"] = self._forwards % self._window >= recomputed_from
        return changed


def _handles(recv_prev: bool, recv_next: bool, tensor_send_next: Any, tensor_send_prev: Any) -> dict[str, Any]:
    """Return a handle for each transfer that the host began and will wait for."""
    begun = {
        "send_next": tensor_send_next is not None,
        "recv_prev": recv_prev,
        "send_prev": tensor_send_prev is not None,
        "recv_next": recv_next,
    }
    return {name: _Arrived() for name, is_begun in begun.items() if is_begun}


def _reduces_early(config: Any, position: PipelinePosition) -> bool:
    """Return whether the host reduces a bucket as soon as it has the gradients of the last microbatch.

    With a ``grad_sync_func`` it does so only on the first rank, and only in the schedule of one chunk.
    """
    return config.grad_sync_func is None or (position.chunks == 1 and position.rank == 0)


def _input_shape(batch: Batch, config: Any) -> Any:
    """Return the shape of each input of a stage in an interleaved schedule."""
    groups = batch.pg_collection
    tp_group = groups.tp if groups else parallel_state.get_tensor_model_parallel_group()
    cp_group = groups.cp if groups else parallel_state.get_context_parallel_group()
    shapes = host.get_tensor_shapes(
        seq_length=batch.seq_length,
        micro_batch_size=batch.micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=tp_group,
        cp_group=cp_group,
    )
    return shapes[0]


def check_v(config: Any) -> None:
    """Raise UnsupportedError if a model with this TransformerConfig could not be right in a V."""
    refuse(config_problem(config))
    if getattr(config, "mtp_num_layers", None):
        refuse("mtp_num_layers is set, and multi-token prediction was not checked with chunks in a V")
    if config.variable_seq_lengths:
        refuse("variable_seq_lengths is True, and in a V transfers need one shape")


def _check_replaceable(batch: Batch, pp_group: Any) -> None:
    """Raise UnsupportedError if chunks in a V cannot run, since the host's transfers cannot be skipped."""
    if not is_replaceable(batch, pp_group):
        raise UnsupportedError(
            "timely_freeze cannot run chunks in a V here: the batch's p2p_communicator has a _communicate or a "
            'pipeline group of its own; use Megatron\'s, or placement "host"'
        )


def is_replaceable(batch: Batch, pp_group: Any) -> bool:
    """Return whether transfers through the batch's communicator (None: the host's default) can be skipped."""
    communicator = batch.p2p_communicator
    if communicator is None:
        return True
    ours = type(communicator)._communicate is P2PCommunicator._communicate
    return ours and dist.get_process_group_ranks(communicator.pp_group) == dist.get_process_group_ranks(pp_group)
