"""Freezing in NeMo AutoModel's recipes, whose pipelines are torch.distributed.pipelining's.

In the job's YAML file ``recipe: tf_adapters.trainers.automodel.FreezingRecipe`` and a ``timely_freeze`` section.
Source: nemo_automodel/recipes (base_recipe.py, llm/train_ft.py), nemo_automodel/components/loss/mtp.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.hosts.launcher import errors_in_one_line
from tf_adapters.hosts.support import missing_name, refuse
from tf_adapters.log import announce
from tf_adapters.overrides import Overrides
from tf_adapters.torch_pipelining.entry import attach
from tf_adapters.torch_pipelining.replicas import inside_replica
from tf_adapters.torch_pipelining.units import TRAINED_BY_LOSS
from tf_adapters.trainers.run import TrainerRun
from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS, warmup_left

_RECIPE = ("checkpointer", "lr_scheduler", "optimizer", "pp", "step_scheduler")


class RecipeRun(TrainerRun):
    """Freezing in a recipe. The recipe tracks its state and saves it in each checkpoint, as ``timely_freeze.pt``."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run; empty without an adapter."""
        return {} if self.adapter is None else dict(self.adapter.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store the state until freezing is attached, since a recipe loads its checkpoint during its setup."""
        self.loaded = state


class Freezing:
    """A mixin for a recipe of AutoModel that trains a pipeline. Put it first among the recipe's bases.

    It reads the ``timely_freeze`` section when the recipe is made, and attaches at the start of the training loop. It
    resumes from the state in the loaded checkpoint, adds figures to the recipe's logs, and detaches at the end.
    During training ``timely_freeze.adapter`` is the adapter.

    Raises ConfigError if a setting is wrong. The start of training raises UnsupportedError, on all ranks, if freezing
    cannot be right in this job.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)  # type: ignore[call-arg]
        section = self.cfg.get(SECTION, None)  # type: ignore[attr-defined]
        values = section.to_dict() if hasattr(section, "to_dict") else section
        self._freeze_settings = None if values is None else TimelyFreezeConfig.parse(values)
        self.timely_freeze = RecipeRun()

    def run_train_validation_loop(self) -> Any:
        """Run AutoModel's training loop with freezing."""
        if self._freeze_settings is None:
            announce(dist.get_rank(), f'disabled: the config has no "{SECTION}" section')
        else:
            _begin(self, self.timely_freeze, self._freeze_settings)
        result = super().run_train_validation_loop()  # type: ignore[misc]
        self.timely_freeze.end()
        return result

    def log_train_metrics(self, log_data: Any) -> None:
        """Log our figures with AutoModel's."""
        log_data.metrics.update(self.timely_freeze.figures)
        super().log_train_metrics(log_data)  # type: ignore[misc]

    def _load_checkpoint_tracked_state(self, ckpt_dir: str) -> Any:
        """Load a checkpoint. If it was saved without freezing, load all but our state."""
        tracked: set[str] = self.__dict__["__state_tracked"]
        absent = not os.path.isfile(os.path.join(ckpt_dir, f"{SECTION}.pt"))
        if absent:
            tracked.discard(SECTION)
        try:
            return super()._load_checkpoint_tracked_state(ckpt_dir)  # type: ignore[misc]
        finally:
            if absent:
                tracked.add(SECTION)


class FreezingRecipe(Freezing, TrainFinetuneRecipeForNextTokenPrediction):  # type: ignore[misc]
    """AutoModel's recipe for next-token prediction (pre-training, fine-tuning, PEFT), with freezing."""


def _begin(recipe: Any, run: RecipeRun, settings: TimelyFreezeConfig) -> None:
    refuse(missing_name(recipe, _RECIPE, called="recipe"))
    if recipe.pp is None:
        refuse("the recipe trains without a pipeline; set distributed.pp_size above 1")
    if getattr(recipe, "partial_cuda_graph_manager", None) is not None:
        refuse("the backend captures CUDA graphs, which would replay one mask for ever; leave them off")
    with Overrides() as marks:
        for stage in recipe.pp.info.stages:
            _mark_output_layer(stage, marks)
        run.begin(
            partial(
                attach,
                recipe.pp.info.schedule,
                settings.reporting_in(recipe.checkpointer.config.checkpoint_dir),
                optimizer=list(recipe.optimizer),
            ),
            warmup_left(recipe.lr_scheduler[0]) if recipe.lr_scheduler else DEFAULT_WARMUP_STEPS,
            (lambda: run.loaded[SECTION]) if recipe.step_scheduler.step > 0 else None,
        )


def _mark_output_layer(stage: Any, marks: Overrides) -> None:
    """Mark a stage if the loss computes with its output layer.

    Linear cross entropy and the loss of multi-token prediction take hidden states and that layer's weight.
    """
    module: torch.nn.Module = inside_replica(stage.submod)
    model: Any = module
    wholly = any(getattr(module, "_pp_return_hidden_states", False) for module in (stage.submod, model))
    if not stage.is_last or not (wholly or getattr(model, "mtp", None) is not None):
        return
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    parts = model.named_modules()
    names = tuple(name for name, part in parts if name and (part is layer or name.split(".")[-1] == "lm_head"))
    marks.set(model, TRAINED_BY_LOSS, names)


def main(config_path: str | None = None) -> None:
    """Run the recipe with a YAML file: ``torchrun ... -m tf_adapters.trainers.automodel -c job.yaml``."""
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config

    with errors_in_one_line("tf_adapters.trainers.automodel"):
        recipe = FreezingRecipe(parse_args_and_load_config(config_path))
        recipe.setup()
        recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
