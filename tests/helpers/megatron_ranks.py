"""What the ranks of the Megatron tests run: a small GPTModel in Megatron-Core's real schedules, DDP and optimizers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import user_layers
from megatron_low_rank import with_adapters
from rank_pools import destroy_groups, seed

from benchmarks.shared.megatron_samples import sampled_layers
from tf_adapters.testing import force_plan
from tf_adapters.testing.oracle import Draws, Samples, recorded_draws

VOCABULARY, WIDTH, HEADS, CONTEXT, BATCH = 32, 16, 4, 8, 2
SECTION: dict[str, Any] = {
    "max_freeze_ratio": 0.8,
    "warmup_steps": 1,
    "monitoring_steps": 2,
    "progressive_steps": 2,
    "on_error": "raise",
}
CHUNKS: list[Any] = []  # that this process has built since the last teardown


@dataclass(frozen=True)
class Trained:
    """A partly frozen model: what trains of some layers, counted from 1; nothing else does."""

    layers: range
    names: str = "lora"  # of what trains: low-rank adapters beside the linear layers, or something of the layer's own


@dataclass(frozen=True)
class Case:
    """One training run: the parallel sizes, what the configs say, and for how long."""

    pp: int = 2
    vp: int | None = None
    v: bool = False  # two chunks on each rank in a V
    tp: int = 1
    ep: int = 1
    layers: int = 4
    microbatches: int = 4
    context: int = CONTEXT
    model: dict[str, Any] = field(default_factory=dict)  # of TransformerConfig
    ddp: dict[str, Any] = field(default_factory=dict)  # of DistributedDataParallelConfig
    optimizer: dict[str, Any] = field(default_factory=dict)  # of OptimizerConfig
    align: bool = False  # communicate at the same time on all pipeline ranks
    section: dict[str, Any] | None = field(default_factory=dict)
    tied: bool = False
    trained: Trained | None = None  # what trains where not everything does
    engine: bool = False  # Transformer Engine's layers
    beside: str = ""  # every MLP, a layer of ``user_layers``
    steps: int = 3
    numbers: tuple[int, ...] = ()  # of microbatches in the steps in turn, where they change
    ratios: float | dict[str, float] | None = None  # a plan to start with, instead of a measured one
    output_dir: str = "runs/tests"

    def microbatches_in(self, step: int) -> int:
        return self.numbers[step % len(self.numbers)] if self.numbers else self.microbatches

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp,
            "expert_model_parallel_size": self.ep,
        }

    @property
    def settings(self) -> dict[str, Any]:
        return {**SECTION, "output_dir": self.output_dir, **(self.section or {})}


def setup() -> None:
    """Runs first in every rank."""
    from tf_adapters.testing.megatron_on_cpu import install

    install()
    torch.distributed.init_process_group("gloo")


def setup_engine() -> None:
    """As ``setup``, with Transformer Engine."""
    from tf_adapters.testing.transformer_engine_on_cpu import install

    install()
    setup()


def teardown() -> None:
    """Lets go of the models and their groups."""
    while CHUNKS:
        for module in list(CHUNKS.pop().modules()):  # autograd holds some of them for ever
            vars(module).clear()
    destroy_model_parallel()


def destroy_model_parallel() -> None:
    """Megatron-Core only forgets its groups, of which it has dozens."""
    from megatron.core import parallel_state

    torch.distributed.barrier()  # nobody still reads what another rank has sent
    parallel_state.destroy_model_parallel()
    destroy_groups()


def initialize(case: Case) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.is_initialized():
        destroy_model_parallel()
    place(case)
    parallel_state.initialize_model_parallel(**case.sizes)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)


def place(case: Case) -> None:
    """Put the chunks into a V, or take back what did so for an earlier case."""
    from megatron_patches import first_stage, layer_layout, parallel_groups, tied_embeddings
    from megatron_patches.patch import revert_all
    from tf_adapters.megatron import place_in_v

    if case.v:
        place_in_v()
    else:
        for module in (first_stage, parallel_groups, layer_layout, tied_embeddings):
            revert_all(module.PATCHES)


def transformer_config(case: Case) -> Any:
    from megatron.core.transformer import TransformerConfig

    from tf_adapters.megatron.placement import even_layout

    chosen: dict[str, Any] = {
        "num_layers": case.layers,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "batch_p2p_comm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "deallocate_pipeline_outputs": True,
        "pipeline_dtype": torch.float32,
        "init_method_std": 0.2,
        **case.sizes,
        **case.model,
    }
    if case.pp == 1:
        chosen.pop("pipeline_dtype")
    if case.v:
        chosen.setdefault("pipeline_model_parallel_layout", even_layout(case.layers, case.pp))
    return TransformerConfig(**chosen)


class Norm(torch.nn.LayerNorm):
    """torch's, for sequence parallelism too: without Apex or Transformer Engine Megatron has none."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Beside(torch.nn.Module):
    """An MLP, and a layer of a user's own that works on the first features."""

    def __init__(self, mlp: Any, layer: str, number: int) -> None:
        super().__init__()
        seed(number)
        self.mlp, self.layer = mlp, user_layers.LAYERS[layer]()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = self.mlp(x, *args, **kwargs)
        own = self.layer(x[..., : user_layers.WIDTH].contiguous())
        return output + torch.nn.functional.pad(own, (0, WIDTH - user_layers.WIDTH)), bias


def build_chunks(case: Case, wrap: bool = True) -> list[torch.nn.Module]:
    """This rank's model chunks, as a training script makes them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    config = transformer_config(case)
    layer, norm = (
        engine_layers(config)
        if case.engine
        else (get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False), Norm)
    )
    if not case.engine:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    chunks: list[Any] = []
    for chunk in range(case.vp or 1):
        virtual = {} if case.vp is None else {"vp_stage": chunk}
        layers = get_num_layers_to_build(config, **virtual)
        model = GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm),
            VOCABULARY,
            case.context,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            share_embeddings_and_output_weights=case.tied,
            mtp_block_spec=further_tokens(config, layer, virtual),
            **virtual,
        )
        for built in model.decoder.layers if case.beside else ():
            built.mlp = Beside(built.mlp, case.beside, built.layer_number)
        if case.trained is not None:
            freeze_but(model, case.trained)
        chunks.append(model)
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    if wrap:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=2000, **case.ddp)
        # The order in which Megatron-LM wraps them: only the first chunk's last bucket is reduced late.
        chunks = [DistributedDataParallel(config, settings, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
        for chunk in chunks:
            chunk.broadcast_params()
    CHUNKS.extend(chunks)
    return chunks


def engine_layers(config: Any) -> tuple[Any, Any]:
    """A layer of Transformer Engine's, and its norm."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.enums import AttnBackend

    config.attention_backend = AttnBackend.unfused
    experts = config.num_moe_experts
    return get_gpt_layer_with_transformer_engine_spec(experts, moe_grouped_gemm=config.moe_grouped_gemm), TENorm


def further_tokens(config: Any, layer: Any, virtual: dict[str, int]) -> Any:
    """The block of this chunk that predicts further tokens (multi-token prediction), where it has one."""
    if not config.mtp_num_layers:
        return None
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossLoggingHelper,
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec,
        mtp_on_this_rank,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    if not mtp_on_this_rank(config, ignore_virtual=False, **virtual):
        return None
    MTPLossLoggingHelper.tracker.clear()  # the process's: the last model had other depths, maybe
    spec = get_mtp_layer_spec(layer, use_transformer_engine=False)
    spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = Norm
    layers = MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * config.mtp_num_layers)
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=layers)


def freeze_but(model: Any, trained: Trained) -> None:
    """Freeze a model but for what trains, as a fine-tuning script does before it is wrapped."""
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        if layer.layer_number not in trained.layers:
            continue
        if trained.names == "lora":
            with_adapters(layer)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(trained.names in name)


def build_optimizer(case: Case, chunks: list[Any]) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    chosen: dict[str, Any] = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, **case.optimizer}
    optimizer = get_megatron_optimizer(OptimizerConfig(**chosen), chunks)
    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if case.ddp.get("overlap_grad_reduce"):
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        if case.align:
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if case.ddp.get("overlap_param_gather") and case.align:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])
    return optimizer


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def batch(
    step: int, replica: int, microbatches: Sequence[int], context: int = CONTEXT
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of the given microbatches of one step: a pure function of its arguments."""
    for microbatch in microbatches:
        generator = torch.Generator().manual_seed(10000 * step + 100 * replica + microbatch)
        tokens = torch.randint(VOCABULARY, (BATCH, context + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def mean_loss(per_token: torch.Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return per_token
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}


def forward_step(data: Any, model: Any, recomputed: bool | None = None) -> Any:
    tokens, labels = next(data)
    length = tokens.shape[1]
    positions = torch.arange(length).expand(BATCH, length)
    causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    return model(tokens, positions, causal, labels=labels), mean_loss


def run_batch(
    case: Case,
    chunks: list[Any],
    step: int,
    microbatches: Sequence[int],
    forward_only: bool = False,
    length: int | None = None,
    **given: Any,
) -> Any:
    """One pass of Megatron's schedule over microbatches of ``length`` tokens; the losses, on the last stage.

    A context is ``case.context`` tokens long, if no other length is given.

    ``given`` are more arguments of the schedule.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    replica = parallel_state.get_data_parallel_rank()
    length = length or case.context
    data = [_cut(batch(step, replica, microbatches, case.context), length) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        **given,
    )


def _cut(data: Iterable[Any], length: int) -> Iterator[Any]:
    return ((tokens[:, :length], labels[:, :length]) for tokens, labels in data)


def zero_gradients(chunks: list[Any], optimizer: Any) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


def stage_of(case: Case, chunk: int) -> int:
    from megatron.core import parallel_state

    from tf_adapters.megatron.placement import PipelinePosition

    rank = parallel_state.get_pipeline_model_parallel_rank()
    return PipelinePosition(rank, case.pp, case.vp or 1, case.v).stage(chunk)


def innermost(chunk: Any) -> torch.nn.Module:
    from tf_adapters.megatron.chunks import innermost as unwrap

    return unwrap(chunk)


def by_name(case: Case, chunks: list[Any], value: Any) -> dict[tuple[int, str], torch.Tensor]:
    """``value`` of every parameter of this rank, by stage and name."""
    return {
        (stage_of(case, index), name): value(parameter)
        for index, chunk in enumerate(chunks)
        for name, parameter in innermost(chunk).named_parameters()
    }


def main_gradient(parameter: Any) -> torch.Tensor:
    if not parameter.requires_grad:  # DDP has no buffer for it
        assert parameter.grad is None
        return torch.zeros(parameter.shape)
    return parameter.main_grad.detach().clone().float()


def owned_ranges(case: Case, chunks: list[Any], optimizer: Any) -> dict[tuple[int, str], tuple[int, int]]:
    """The elements of each parameter whose reduced gradient this rank holds: all, or its optimizer shard's."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    leaves = getattr(optimizer, "chained_optimizers", [optimizer])
    sharded = [leaf for leaf in leaves if isinstance(leaf, DistributedOptimizer)]

    def owned(parameter: Any) -> tuple[int, int]:
        if not sharded or not parameter.requires_grad:
            return 0, parameter.numel()
        for leaf in sharded:
            if parameter in leaf.model_param_group_index_map:
                shard = leaf._get_model_param_range_map(parameter)["param"]
                return shard.start, shard.end
        return 0, 0

    return by_name(case, chunks, owned)


def all_masks(controller: Any) -> dict[tuple[int, int], tuple[str, ...]]:
    schedule = controller.schedule
    return {
        (s, m): controller.frozen_parameters(controller.step, s, m)
        for s in range(schedule.num_stages)
        for m in range(schedule.num_microbatches)
    }


def start(case: Case) -> tuple[list[Any], Any, Any]:
    """Model, optimizer and adapter of a fresh run (no adapter where the case has no section)."""
    import tf_adapters.megatron

    initialize(case)
    chunks = build_chunks(case)
    optimizer = build_optimizer(case, chunks)
    adapter = None
    if case.section is not None:
        adapter = tf_adapters.megatron.attach(chunks, optimizer, case.settings, num_microbatches=case.microbatches)
        if adapter is not None and case.ratios is not None:
            force_plan(adapter.controller, case.ratios)
    return chunks, optimizer, adapter


def train_step(
    case: Case, chunks: list[Any], optimizer: Any, step: int, microbatches: int = 0, **given: Any
) -> list[float]:
    zero_gradients(chunks, optimizer)
    losses = run_batch(case, chunks, step, range(microbatches or case.microbatches_in(step)), **given)
    optimizer.step()
    return [float(entry["loss"]) for entry in losses]


def plain(case: Case) -> Case:
    """A case of the same parallel sizes with none of what is under test.

    No adapter, recompute, overlap, fused gradients or tied weights: each place of such a weight has its own gradient.
    """
    model = {k: v for k, v in case.model.items() if not k.startswith(("recompute_", "gradient_accumulation_"))}
    return replace(case, tied=False, ddp={}, model=model)


def plain_copies(case: Case) -> list[Any]:
    """An ordinary copy of the chunks that nothing masks, for ``full_gradients``."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    copies = build_chunks(plain(case))
    get_model_config(copies[0]).finalize_model_grads_func = finalize_model_grads
    return copies


def full_gradients(
    case: Case, chunks: list[Any], copies: list[Any], step: int, samples: list[list[Samples]] | None = None
) -> list[dict[tuple[int, str], torch.Tensor]]:
    """Full gradients of each microbatch, from ``plain_copies`` that get the weights of the chunks.

    Tokens count as ``samples`` says: by microbatch and chunk; without them each counts once.
    """
    finalizing = sys.modules["megatron.core.distributed.finalize_model_grads"]
    for copy, chunk in zip(copies, chunks, strict=True):
        own = dict(innermost(chunk).named_parameters())
        embedding = own.get("embedding.word_embeddings.weight")
        for name, parameter in innermost(copy).named_parameters():
            if case.tied and name == "output_layer.weight" and embedding is not None:
                parameter.data.copy_(embedding.data)
            else:
                parameter.data.copy_(own[name].data)
    # Interleaving needs a whole group of microbatches: several of the same have the same mean.
    at_least = max(case.pp, case.model.get("microbatch_group_size_per_vp_stage", 1)) if case.vp else 1
    found = []
    for microbatch in range(case.microbatches_in(step)):
        for copy in copies:
            copy.zero_grad_buffer()
        with ExitStack() as sampled, patch.object(finalizing, "_allreduce_word_embedding_grads"):
            for copy, of_chunk in zip(copies, samples[microbatch] if samples else (), strict=bool(samples)):
                sampled.enter_context(sampled_layers(innermost(copy), of_chunk))
            run_batch(plain(case), copies, step, [microbatch] * at_least)
        found.append(by_name(case, copies, main_gradient))
    return found


def drawn_samples(case: Case, chunks: list[Any], draws: Draws, step: int, number: int) -> list[list[Samples]]:
    """What this rank has sampled in the controller's ``step``, by microbatch and chunk."""
    return [
        [draws.get((number, stage_of(case, index), microbatch), {}) for index in range(len(chunks))]
        for microbatch in range(case.microbatches_in(step))
    ]


def train(case: Case, oracle: bool = True, evaluate: bool = False) -> dict[str, Any]:
    with recorded_draws() as draws:
        return {**_train(case, draws, oracle=oracle, evaluate=evaluate), "draws": draws}


def _train(case: Case, draws: Draws, oracle: bool, evaluate: bool) -> dict[str, Any]:
    """Train and record, for every step, what the oracle needs; with ``evaluate``, evaluate after each step."""
    from megatron.core import parallel_state

    chunks, optimizer, adapter = start(case)
    copies = plain_copies(case) if adapter is not None and oracle else []
    steps = []
    for number in range(case.steps):
        phase = adapter and adapter.controller.phase.value
        zero_gradients(chunks, optimizer)
        losses = run_batch(case, chunks, number, range(case.microbatches_in(number)))
        masks = all_masks(adapter.controller) if adapter is not None else {}
        gradients = by_name(case, chunks, main_gradient)
        # Only now: an overlapped all-gather of the parameters ends in the forward.
        before = by_name(case, chunks, values)
        full = []
        if copies:
            samples = drawn_samples(case, chunks, draws, number, adapter.controller.step)
            full = full_gradients(case, chunks, copies, number, samples)
        state_before = optimizer_state(chunks, optimizer)
        optimizer.step()
        steps.append(
            {
                "losses": [float(entry["loss"]) for entry in losses],
                "full": full,
                "masks": masks,
                "computed_mean": case.section is not None and case.settings.get("gradient_scale") == "computed_mean",
                "phase": phase,
                "state_before": state_before,
                "state_after": optimizer_state(chunks, optimizer),
                "gradients": gradients,
                "owned": owned_ranges(case, chunks, optimizer),
                "before": before,
                "after": by_name(case, chunks, values),
                "evaluations": evaluate and evaluation(case, chunks, number),
            }
        )
    result = {
        "place": (parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        "steps": steps,
    }
    if adapter is not None:
        state = adapter.controller.state
        result["schedule"] = adapter.controller.schedule.to_text()
        result["plan"] = state.plan and state.plan.to_json()
        result |= {"status": state.failure, "notes": list(state.notes)}
        result["numbers"] = sorted(state.plans.of)
        adapter.detach()
    return result


def evaluation(case: Case, chunks: list[Any], step: int) -> list[float]:
    """Losses of a forward-only pass, as Megatron evaluates."""
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        losses = run_batch(case, chunks, 1000 + step, range(case.microbatches), forward_only=True)
    for chunk in chunks:
        chunk.train()
    return [float(entry["loss"]) for entry in losses]


def optimizer_state(chunks: list[Any], optimizer: Any) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
    """What the inner optimizer keeps for each parameter (this rank's shard of it), by chunk and name."""
    from tf_adapters.megatron.optimizers import _updated, inner_of, leaves

    found: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for index, chunk in enumerate(chunks):
        for name, parameter in innermost(chunk).named_parameters():
            for leaf in leaves(optimizer):
                for main in _updated(leaf, parameter):
                    state = inner_of(leaf).state.get(main, {})
                    kept = {k: v.clone() for k, v in state.items() if torch.is_tensor(v)}
                    found.setdefault((index, name), {}).update(value=main.detach().clone(), **kept)
    return found


def values(parameter: Any) -> torch.Tensor:
    return parameter.detach().clone()
