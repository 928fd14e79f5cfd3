"""A small byte-level GPT out of Megatron-Core's parts: what each rank holds of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import device  # isort: split

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Sizes:
    """The model, one batch of it, and how both are cut over the ranks. What ranks are left make replicas."""

    pipeline: int = 2
    virtual_pipeline: int = 1
    in_v: bool = False  # the two chunks of each rank
    tensor: int = 1
    layers: int = 8
    hidden: int = 256
    heads: int = 4
    context: int = 64
    microbatches: int = 8
    micro_batch: int = 4
    bf16: bool = False
    distributed_optimizer: bool = False
    recompute: bool = False
    tied: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError, one line, where these do not fit each other."""
        for name, value in vars(self).items():
            if name != "seed" and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(f"virtual_pipeline is {self.virtual_pipeline}, which needs a pipeline of several ranks")
        if self.in_v and self.virtual_pipeline != 2:
            raise ValueError(f"virtual_pipeline is {self.virtual_pipeline}: it must be 2 for chunks in a V")
        for name, divisor in (
            ("layers", self.pipeline * self.virtual_pipeline),
            ("hidden", self.heads),
            ("heads", self.tensor),
            ("microbatches", self.pipeline if self.virtual_pipeline > 1 else 1),
        ):
            if getattr(self, name) % divisor:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be a multiple of {divisor} here")

    @property
    def ranks(self) -> int:
        """Ranks that hold one replica."""
        return self.pipeline * self.tensor

    @property
    def parallel(self) -> dict[str, Any]:
        """As both of Megatron's functions that want them call them."""
        return {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "virtual_pipeline_model_parallel_size": self.virtual_pipeline if self.virtual_pipeline > 1 else None,
        }


def transformer_config(sizes: Sizes) -> TransformerConfig:
    chosen: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,  # the same weights wherever they are
        "overlap_p2p_comm": sizes.virtual_pipeline > 1,  # as Megatron-LM does
        "batch_p2p_comm": device.GPU and sizes.virtual_pipeline == 1,  # gloo sends one by one
        # Extensions that plain Megatron-Core does not bring along.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        **sizes.parallel,
    }
    if sizes.in_v:
        each = sizes.layers // (2 * sizes.pipeline) * "t"
        stages = [each] * (2 * sizes.pipeline)
        chosen["pipeline_model_parallel_layout"] = "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])
    if sizes.bf16:
        chosen |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    if sizes.recompute:
        chosen |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**chosen)


def layer_spec() -> Any:
    """Transformer Engine's layers where they can run, else Megatron's own."""
    if device.GPU and gpt_layer_specs.HAVE_TE:
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    return gpt_layer_specs.get_gpt_layer_local_spec()


def build_chunks(sizes: Sizes) -> list[DistributedDataParallel]:
    """This rank's model chunks in Megatron's wrappers; the weights depend on the sizes only."""
    seed = sizes.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = transformer_config(sizes)
    chunks = [_build_chunk(sizes, config, index) for index in range(sizes.virtual_pipeline)]
    return [_wrap(sizes, config, chunk, index) for index, chunk in enumerate(chunks)]


def _build_chunk(sizes: Sizes, config: TransformerConfig, index: int) -> torch.nn.Module:
    place: dict[str, Any] = {"vp_stage": index} if sizes.virtual_pipeline > 1 else {}
    chunk = GPTModel(
        config,
        layer_spec(),
        VOCABULARY,
        sizes.context,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place),
        share_embeddings_and_output_weights=sizes.tied,
        **place,
    ).cuda()
    return Float16Module(config, chunk) if sizes.bf16 else chunk


def _wrap(sizes: Sizes, config: TransformerConfig, chunk: torch.nn.Module, index: int) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=sizes.distributed_optimizer,
        overlap_grad_reduce=sizes.distributed_optimizer,
        overlap_param_gather=sizes.distributed_optimizer,
    )
    wrapped = DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
    wrapped.broadcast_params()
    return wrapped
