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
    """Return the stage of a pipeline rank's phase. Activations flow out through phase 0 and back through phase 1."""
    return rank if phase == 0 else 2 * ranks - 1 - rank


def phase_of(stage: int, ranks: int) -> int:
    """Return the phase in which a pipeline rank runs a stage; the inverse of ``stage_of``."""
    return 0 if stage < ranks else 1


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
    own = {
        stage: {id(p) for layer in layers.values() for p in layer.parameters()}
        for stage, layers in layers_by_stage(engine).items()
    }
    return {stage: {name: p for name, p in named.items() if id(p) in held} for stage, held in own.items()}


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
    layers: dict[int, dict[str, torch.nn.Module]] = {}
    for phase, stage in stages_of(engine).items():
        modules = {str(index): _layer(engine.module, index) for index in _indices(engine, phase)}
        layers[stage] = {index: layer for index, layer in modules.items() if layer is not None}
    return layers


def _layer(module: Any, index: int) -> torch.nn.Module | None:
    """Return the module of a layer, or None if the layer is a function."""
    key = getattr(module._layer_specs[index], "key", None)
    layer: torch.nn.Module | None = module.tied_modules[key] if key else module._modules.get(str(index))
    return layer


def _indices(engine: Any, phase: int) -> range:
    """Return the numbers of the layers of this rank's phase."""
    module = engine.module
    return range(*(module.phase_bounds[phase] if is_dualpipev(engine) else (module._local_start, module._local_stop)))


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
    specs = [module._layer_specs[index] for index in _indices(engine, phase)]
    keys = {spec.key for spec in specs if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None}
    return lambda name, parameter: name.startswith("tied_modules.") and name.split(".")[1] in keys
