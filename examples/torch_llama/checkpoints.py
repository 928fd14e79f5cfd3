"""A training's state through torch.distributed.checkpoint: each rank writes its part, and reads what it needs.

Tensors go under the names that they have in the whole model, so a run may go on under another schedule or on another
number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from pipeline import Trainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # by name alone, as ranks have different stages


class TrainingState:
    """Weights, optimizers and the number of steps, as a Stateful."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._parts = list(zip(trainer.stages.values(), trainer.optimizers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        model: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        for parts in self._parts:
            of_stage, of_optimizer = get_state_dict(*parts, options=OPTIONS)
            model |= of_stage
            optimizer |= of_optimizer
        return {"finished_steps": self._trainer.finished_steps, "model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for stage, optimizer in self._parts:
            set_state_dict(
                stage,
                optimizer,
                model_state_dict={name: state_dict["model"][name] for name in stage.state_dict()},
                optim_state_dict=state_dict["optimizer"],
                options=OPTIONS,
            )
        self._trainer.finished_steps = state_dict["finished_steps"]


def save(folder: Path, trainer: Trainer, freezing: Any) -> None:
    state: dict[str, Any] = {"training": TrainingState(trainer)}
    if freezing:
        state["freezing"] = freezing  # TimelyFreeze: the adapter is a Stateful too
    dcp.save(state, checkpoint_id=folder)


def load(folder: Path, trainer: Trainer, freezing: Any) -> None:
    """Go on where ``save`` was called. SystemExit, one line, where the folder holds no such training."""
    saved = metadata(folder)
    state: dict[str, Any] = {"training": TrainingState(trainer)}
    for name, tensor in state["training"].state_dict()["model"].items():
        saved_size = getattr(saved.get(f"training.model.{name}"), "size", None)
        if saved_size != tensor.shape:
            there, here = shape(saved_size), shape(tensor.shape)
            raise SystemExit(f"the training in {folder} is of another model: {name} is {there} there, {here} here")
    if freezing and any(name.startswith("freezing.") for name in saved):
        state["freezing"] = freezing  # TimelyFreeze: a training that had none begins with it now
    dcp.load(state, checkpoint_id=folder)


def metadata(folder: Path) -> dict[str, Any]:
    """What each saved name stands for."""
    if not (folder / ".metadata").is_file():
        raise SystemExit(f"no saved training in {folder}")
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


def shape(size: Any) -> str:
    return "missing" if size is None else " x ".join(map(str, size))
