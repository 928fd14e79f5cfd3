"""A small GPT of Megatron-Core on one rank: with Transformer Engine's layers, or with Megatron's own."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.parts import Options
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.testing import force_plan
from tf_adapters.training.plan_maker import Planned

if TYPE_CHECKING:
    from tf_adapters.training.controller import Controller

VOCABULARY, ROWS, MICROBATCHES = 256, 2, 4


@dataclass(frozen=True)
class Case:
    """A model and how it trains: what Megatron's configs say, and the settings of freezing."""

    engine: bool = True  # Transformer Engine's layers
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False  # the distributed optimizer
    settings: dict[str, Any] = field(default_factory=dict)


def prepare(options: Options, engine: bool = True) -> None:
    """Prepare the process. Called before Megatron is imported. ``engine`` takes Transformer Engine where it can run."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from tf_adapters.testing import megatron_on_cpu, transformer_engine_on_cpu

    megatron_on_cpu.stand_in_for_apex()
    if not options.cuda:
        with_engine = engine and transformer_engine_on_cpu.available()
        (transformer_engine_on_cpu if with_engine else megatron_on_cpu).install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)


def engine_available(options: Options) -> bool:
    """Return whether Transformer Engine is installed; on a CPU its Python code is enough."""
    if options.cuda:
        return importlib.util.find_spec("transformer_engine") is not None
    from tf_adapters.testing import transformer_engine_on_cpu

    return transformer_engine_on_cpu.available()


def context(options: Options) -> int:
    return 8 if options.tiny else 128


def build(options: Options, case: Case) -> tuple[Any, Any]:
    """Return a wrapped model and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    low = {"bf16": True, "params_dtype": torch.bfloat16} if options.cuda else {}
    chosen: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16 if options.tiny else 256,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        **low,
        **case.model,
    }
    config = TransformerConfig(**chosen)
    if case.engine:
        experts = config.num_moe_experts
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(experts, experts is not None)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
    model: Any = GPTModel(config, spec, VOCABULARY, context(options)).cuda()
    model = Float16Module(config, model) if options.cuda else model
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=case.sharded)
    model = DistributedDataParallel(config, settings, model)
    updates: dict[str, Any] = {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.0, **low}
    updates |= {"use_distributed_optimizer": case.sharded, **case.optimizer}
    optimizer = get_megatron_optimizer(OptimizerConfig(**updates), [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def force_waiting_plan(controller: Controller, ratio: float) -> None:
    """Begin stable freezing at this freeze ratio. Deferred weight gradients all wait for the batch's end.

    One stage is never idle, so none of our plans would defer them.
    """
    force_plan(controller, ratio)
    plan = controller.state.plan
    if plan is None or not controller.config.defers:
        return
    order = [a for rank in plan.to_json()["ranks"] for a in rank]
    late = [a.replace("B", "W") for a in order if "B" in a]
    order = [*(a.replace("B", "I") for a in order), *late]
    times = dict.fromkeys(order, 1.0)
    made = {"ranks": [order], "freeze_ratio": dict.fromkeys(late, ratio), "start_ms": times, "duration_ms": times}
    waiting = FreezePlan.from_json({**plan.to_json(), **made, "critical_path": order})
    controller.state.adopt(controller.schedule, Planned(waiting, step_ms=1.0))


def named(model: Any) -> dict[str, Any]:
    """Return the parameters by the names that the controller gives them."""
    from tf_adapters.megatron.chunks import innermost

    return dict(innermost(model).named_parameters())


def run_batch(options: Options, model: Any, step: int, microbatches: Sequence[int]) -> None:
    """Compute the gradients of some microbatches of a step, in ``main_grad``."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches(options, step, microbatches),
        model=[model],
        num_microbatches=len(microbatches),
        seq_length=context(options),
        micro_batch_size=ROWS,
        forward_only=False,
    )


def update(optimizer: Any) -> None:
    """Finish a step. Without ``zero_grad`` an fp32 model would add its gradients to the next step's."""
    optimizer.step()
    optimizer.zero_grad()


def batches(options: Options, step: int, microbatches: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels. They depend on step and microbatch only."""
    for microbatch in microbatches:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        tokens = torch.randint(VOCABULARY, (ROWS, context(options) + 1), generator=generator)
        yield tokens[:, :-1].contiguous().cuda(), tokens[:, 1:].contiguous().cuda()


def forward_step(data: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    tokens, labels = next(data)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), mean_loss


def mean_loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}
