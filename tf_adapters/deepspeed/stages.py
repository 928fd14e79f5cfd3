"""The pipeline stages of a DeepSpeed rank: one, or two with the DualPipeV engine.

Source: deepspeed/runtime/pipe/engine.py, dualpipev.py and module.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime.pipe.module import TiedLayerSpec

from tf_adapters.hosts.units import UnitRules, units_of
from tf_adapters.selection.freeze_units import FreezeUnit


def is_dualpipev(engine: Any) -> bool:
    """Return whether this is DeepSpeed's DualPipeVEngine (from 0.19.8 on)."""
    return any(cls.__name__ == "DualPipeVEngine" for cls in type(engine).__mro__)


def stage_of(rank: int, ranks: int, phase: int) -> int:
    """Stage of a pipeline rank's phase: activations flow out through phase 0 and come back through phase 1."""
    return rank if phase == 0 else 2 * ranks - 1 - rank


def stages_of(engine: Any) -> dict[int, int]:
    """Return this rank's stage in each phase."""
    phases = (0, 1) if is_dualpipev(engine) else (0,)
    return {phase: stage_of(engine.stage_id, engine.num_stages, phase) for phase in phases}


def parameters_by_stage(engine: Any) -> dict[int, dict[str, torch.nn.Parameter]]:
    """Return this rank's parameters by stage and by name in ``engine.module``.

    In DualPipeV, layers that the first and the last stage share are one module on rank 0, and belong to both stages.
    """
    named = dict(engine.module.named_parameters())
    if not is_dualpipev(engine):
        return {engine.stage_id: named}
    return {
        stage: {name: p for name, p in named.items() if _belongs(name, _layers(engine.module, phase))}
        for phase, stage in stages_of(engine).items()
    }


def tied_names(engine: Any, parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]) -> set[str]:
    """Return the names of this rank's weights whose gradients are summed over several stages.

    A tied module's ``tied_weight_attr`` is summed; its other weights belong to each stage. In DualPipeV one
    module serves both stages of rank 0, so all its weights are summed.
    """
    reduced = {id(weight) for weight, _ in engine.module.get_tied_weights_and_groups()}
    places = Counter(name for of_stage in parameters.values() for name in of_stage)
    return {
        name
        for of_stage in parameters.values()
        for name, parameter in of_stage.items()
        if id(parameter) in reduced or places[name] > 1
    }


def layers_by_stage(engine: Any) -> dict[int, dict[str, torch.nn.Module]]:
    """Return this rank's layers by stage and by their number in the whole model."""
    module = engine.module
    return {
        stage: {
            str(index): layer
            for index in range(*_bounds(engine, phase))
            if (layer := _layer(module, index)) is not None
        }
        for phase, stage in stages_of(engine).items()
    }


def _layer(module: Any, index: int) -> torch.nn.Module | None:
    """Return the module of a layer, or None if the layer is a function."""
    key = getattr(module._layer_specs[index], "key", None)
    layer: torch.nn.Module | None = module.tied_modules[key] if key else module._modules.get(str(index))
    return layer


def _bounds(engine: Any, phase: int) -> tuple[int, int]:
    """Return the index of the first layer of this rank's phase, and the index after its last."""
    module = engine.module
    start, stop = module.phase_bounds[phase] if is_dualpipev(engine) else (module._local_start, module._local_stop)
    return start, stop


def units_by_stage(
    engine: Any, parameters: Mapping[int, Mapping[str, torch.nn.Parameter]]
) -> dict[int, tuple[FreezeUnit, ...]]:
    """Return this rank's units by stage. A tied table counts as a whole matrix if a layer multiplies by it."""
    return {
        stage: tuple(
            unit
            for unit in units_of(engine.module, UnitRules(projects=_multiplies(engine, phase)))
            if unit.names[0] in parameters[stage]
        )
        for phase, stage in stages_of(engine).items()
    }


def _multiplies(engine: Any, phase: int) -> Callable[[str, torch.nn.Parameter], bool]:
    """Return a test for tied weights that a user's function multiplies by, as an output layer does."""
    module = engine.module
    start, stop = _bounds(engine, phase)
    specs = [spec for spec in module._layer_specs[start:stop] if isinstance(spec, TiedLayerSpec)]
    keys = {spec.key for spec in specs if spec.forward_fn is not None}
    return lambda name, parameter: name.startswith("tied_modules.") and name.split(".")[1] in keys


def _layers(module: Any, phase: int) -> set[str]:
    """Return the name prefixes of a phase's parameters: a layer's index, or a tied layer's key."""
    start, stop = module.phase_bounds[phase]
    indices = range(start, stop)
    tied = {f"tied_modules.{key}" for index in indices if (key := getattr(module._layer_specs[index], "key", None))}
    return {str(index) for index in indices} | tied


def _belongs(name: str, layers: set[str]) -> bool:
    parts = name.split(".")
    return parts[0] in layers or ".".join(parts[:2]) in layers
