"""First weights of a Megatron model that depend on their layers only, wherever these are."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model


def whole_name(model: Any, name: str) -> str:
    """Return the name of a chunk's parameter with the number of its layer in the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number)
    return ".".join(parts)


def fill_by_name(chunk: Any, deviation: float = 0.2) -> None:
    """Draw a chunk's matrices again, each from a seed of its own. Tied copies get the same values."""
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    tied = model.share_embeddings_and_output_weights
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        place = whole_name(model, name)
        if tied and place == "output_layer.weight":
            place = "embedding.word_embeddings.weight"
        text = f"{place} {parallel_state.get_tensor_model_parallel_rank()}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(values * deviation)
