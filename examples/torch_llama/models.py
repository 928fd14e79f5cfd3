"""Whole models in Hugging Face's format: new ones, ones from a folder, and back to a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # one for every rank


def new_config(layers: int, width: int, heads: int, context: int, vocabulary: int) -> LlamaConfig:
    """Raises ValueError, one line, where the sizes do not fit each other."""
    if width % (2 * heads):
        raise ValueError(f"width is {width}: it must be a multiple of {2 * heads}, two for each head")
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=None,
    )


def config_in(folder: Path) -> LlamaConfig:
    """Raises ValueError, one line, where the folder holds no Llama."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"no config.json in {folder}: it must be a folder in Hugging Face's format")
    config, _ = LlamaConfig.get_config_dict(folder, local_files_only=True)
    if config.get("model_type") != "llama":
        raise ValueError(f"the model in {folder} is a {config.get('model_type')}: it must be a llama")
    return LlamaConfig.from_pretrained(folder, local_files_only=True)


def build(config: LlamaConfig, folder: Path | None = None, seed: int = 0) -> LlamaForCausalLM:
    """A whole model in host memory, in a folder's own precision; without a folder its weights depend on the seed."""
    torch.manual_seed(seed)
    sdpa = {"attn_implementation": "sdpa"}
    if folder is None:
        return LlamaForCausalLM._from_config(config, **sdpa)
    whole = LlamaForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True, **sdpa)
    if whole.config.tie_word_embeddings:  # they are on different ranks: from here on each learns for itself
        whole.lm_head.weight = nn.Parameter(whole.lm_head.weight.detach().clone())
        whole.config.tie_word_embeddings = False
    return whole


def save(config: LlamaConfig, parts: Iterable[nn.Module], folder: Path, tokenizer: Any = None) -> None:
    """Write all ranks' stages as one model that ``from_pretrained`` reads. Call it on all ranks."""
    state = gather({name: tensor for part in parts for name, tensor in part.state_dict().items()})
    if state is None:
        return
    with torch.device("meta"):
        whole = LlamaForCausalLM(type(config).from_dict({**config.to_dict(), "tie_word_embeddings": False}))
    whole.save_pretrained(folder, state_dict=state)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def gather(mine: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """All ranks' tensors in the memory of rank 0's host; they come one by one, so no device holds more than one."""
    rank = dist.get_rank()
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, {name: tensor.shape for name, tensor in mine.items()})
    if rank != 0:
        for tensor in mine.values():
            dist.send(tensor.contiguous(), 0)
        return None
    whole = {name: tensor.cpu() for name, tensor in mine.items()}
    like = next(iter(mine.values()))
    for source, of_source in enumerate(shapes[1:], 1):
        for name, shape in of_source.items():
            received = like.new_empty(shape)
            dist.recv(received, source)
            whole[name] = received.cpu()
    return whole
