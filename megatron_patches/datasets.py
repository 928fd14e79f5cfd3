"""The ranks that build datasets, and the flags that say whether there is something to train on.

``BlendedMegatronDatasetBuilder.build`` makes the index of a dataset on the world's rank 0 only, if that rank has a
stage with data. ``build_train_valid_test_data_loaders`` asks the same rank whether there is data at all. Without it on
rank 0, training would be skipped without a word.

Versions: run on Megatron-LM 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_patches.patch import Patch, handle_all

BUILDER = Patch(
    "megatron.core.datasets.blended_megatron_dataset_builder", "BlendedMegatronDatasetBuilder.build", "self"
)
LOADERS = Patch("megatron.training.training", "build_train_valid_test_data_loaders")
PATCHES = (BUILDER, LOADERS)


def apply(before_build: Callable[[Any], None], after_loaders: Callable[[Sequence[Any]], None]) -> None:
    """Call ``before_build(builder)``, and ``after_loaders((train, validation, test))`` with this rank's loaders."""

    def build(run: Callable[[], Any], builder: Any) -> Any:
        before_build(builder)
        return run()

    def make_loaders(run: Callable[[], Any]) -> Any:
        loaders = run()
        after_loaders(loaders)
        return loaders

    handle_all({BUILDER: build, LOADERS: make_loaders})
