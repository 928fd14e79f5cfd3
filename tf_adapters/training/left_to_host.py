"""Layers whose weight gradients stay in the host's backward, found in a run's first step and agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_adapters.collectives import Collectives, decide_from_all
from tf_adapters.masking.taps import StageTaps
from tf_adapters.selection.masks import StageMasks

__all__ = ["LeftToHost", "agree", "describe", "leave_to_host", "saved_left_to_host"]

LeftToHost = Mapping[int, Mapping[str, str]]
"""By stage and parameter, why the layer is left to the host."""

_SHOWN = 4
"""Parameters of a stage, at most, that a line names."""


def agree(collectives: Collectives, taps: Mapping[int, StageTaps]) -> LeftToHost:
    """What the checks of all ranks have found. Replicas of a stage leave the same layers. Called on all ranks."""

    def local() -> LeftToHost:
        return {stage: of_stage.end_check() for stage, of_stage in taps.items()}

    def merge(ranks: Sequence[LeftToHost]) -> LeftToHost:
        merged: dict[int, dict[str, str]] = {}
        for of_rank in ranks:
            for stage, found in of_rank.items():
                merged.setdefault(stage, {}).update(found)
        return {stage: dict(sorted(merged[stage].items())) for stage in sorted(merged) if merged[stage]}

    return decide_from_all(collectives, local, merge)


def leave_to_host(left: LeftToHost, taps: Mapping[int, StageTaps], masks: StageMasks) -> None:
    """Tap these layers no more, and sample none of their tokens."""
    for stage, found in left.items():
        if stage in taps:
            taps[stage].leave(found)
        masks.leave_unsampled(stage, found)


def describe(left: LeftToHost) -> list[str]:
    """One line for each stage and reason."""
    lines = []
    for stage, found in left.items():
        for reason in dict.fromkeys(found.values()):
            names = [name for name, why in found.items() if why == reason]
            shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            lines.append(f"stage {stage}: the host itself computes the weight gradient of {shown}: {reason}")
    return lines


def saved_left_to_host(data: Any) -> LeftToHost:
    """What a saved state says of it; nothing where it cannot be read."""
    saved = data.get("left_to_host") if isinstance(data, Mapping) else None
    if not isinstance(saved, Mapping):
        return {}
    return {
        int(stage): {str(name): str(why) for name, why in found.items()}
        for stage, found in saved.items()
        if str(stage).isdecimal() and isinstance(found, Mapping)
    }
