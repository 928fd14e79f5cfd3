"""Chunks in a V in a Megatron-LM script: its arguments, its data, and the arguments that are refused.

Source: megatron/training (the Megatron-LM repository).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_patches import datasets, microbatch_data
from tf_adapters.config import SECTION
from tf_adapters.errors import ConfigError
from tf_adapters.log import announce
from tf_adapters.megatron.patching import patching
from tf_adapters.megatron.placement import VLayout, even_layout
from tf_adapters.megatron.placing import place_in_v

_LEFT_OUT = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("mtp_num_layers", "full_validation", "yaml_cfg"),
)
"""Arguments that place layers in another way, or that were not checked with chunks in a V."""


@patching()
def place_arguments(args: Any) -> None:
    """Put a script's chunks into a V if its arguments say so, before Megatron validates them.

    Raises ConfigError or UnsupportedError, one line, if other arguments do not allow it.
    """
    if getattr(args, f"{SECTION}_placement", "host") != "v":
        return
    size = args.pipeline_model_parallel_size
    if size < 2:
        raise ConfigError(f'--pipeline-model-parallel-size is {size}: allowed with placement "v" is at least 2')
    for name in _LEFT_OUT:
        if getattr(args, name, None):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f'{option} is {getattr(args, name)}: with placement "v", leave it out')
    if args.pipeline_model_parallel_layout is None:
        args.pipeline_model_parallel_layout = _layout_for(args)
    VLayout(args.pipeline_model_parallel_layout, size)  # refuses a wrong number of stages
    place_in_v()
    microbatch_data.apply(needs_all=lambda: parallel_state.is_pipeline_last_stage(ignore_virtual=True))
    datasets.apply(_also_on_rank_0, _agree_on_data)


def _layout_for(args: Any) -> str:
    """Return a layout in which the last stage has fewer layers, as many as its output layer costs.

    The cost is estimated by its products: 12 h^2 weights in a decoder layer, and h V in the output layer.
    """
    vocabulary = args.padded_vocab_size or args.vocab_size or 0
    layout = even_layout(
        args.num_layers, args.pipeline_model_parallel_size, vocabulary / (12.0 * (args.hidden_size or 1))
    )
    announce(
        args.rank,
        f"placement: two chunks on each rank, in a V; layers of the stages: {layout}, fewer in the last one for its "
        "output layer (--pipeline-model-parallel-layout chooses others)",
    )
    return layout


def _also_on_rank_0(builder: Any) -> None:
    """Let a builder of datasets also work on the world's rank 0, which writes the index that all ranks read."""
    given = builder.is_built_on_rank
    builder.is_built_on_rank = lambda: dist.get_rank() == 0 or given()


def _agree_on_data(loaders: Sequence[Any]) -> None:
    """Set the script's flags if any rank has data. Megatron asks rank 0, which may have none in a V."""
    from megatron.training import get_args

    args = get_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.tensor([int(_is_there(loader)) for loader in loaders], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    train, validation, test = map(bool, found.tolist())
    args.do_train = args.do_train or (train and args.train_iters > 0)
    args.do_valid = args.do_valid or (validation and args.eval_iters > 0)
    args.do_test = args.do_test or (test and args.eval_iters > 0)


def _is_there(loader: Any) -> bool:
    if isinstance(loader, (list, tuple)):
        return any(map(_is_there, loader))
    return loader is not None
