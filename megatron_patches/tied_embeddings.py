"""Weights that embedding and output layer share: their start, and the sum of their gradients.

``LanguageModule.setup_embeddings_and_output_layer`` fills the copy of the last stage with zeros, and an all-reduce
adds the first stage's weights. ``_allreduce_word_embedding_grads`` adds the gradients of both. Both act on a process
group of two ranks, and do nothing where one rank has both stages.

Versions: run on 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_patches.patch import Patch, handle_all

START = Patch(
    "megatron.core.models.common.language_module.language_module",
    "LanguageModule.setup_embeddings_and_output_layer",
    "self",
)
GRADIENTS = Patch("megatron.core.distributed.finalize_model_grads", "_allreduce_word_embedding_grads", "model")
PATCHES = (START, GRADIENTS)


def apply(after_start: Callable[[Any], None], add: Callable[[Sequence[Any]], None]) -> None:
    """Call ``after_start(module)`` when a model chunk has its weights, and ``add(chunks)`` after the reduction."""

    def start(run: Callable[[], None], module: Any) -> None:
        run()
        after_start(module)

    def reduce(run: Callable[[], None], model: Sequence[Any]) -> None:
        run()
        add(model)

    handle_all({START: start, GRADIENTS: reduce})
