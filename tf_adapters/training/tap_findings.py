"""The findings of a check of a run's taps: the layers left to the host, and the share of the work that has a tap.

All ranks have the same findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tf_adapters.collectives import Collectives, decide_from_all
from tf_adapters.schedule.durations import Bounds, Share
from tf_adapters.schedule.ir import Action
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.selection.masks import StageMasks
from tf_adapters.training.pipeline import HostPipeline
from tf_adapters.values import Value
from tf_adapters.weight_gradients.reasons import CHANGES, PROVISIONAL, SAID
from tf_adapters.weight_gradients.tapped_layer import may_update_in_backward
from tf_adapters.weight_gradients.taps import StageTaps

_SHOWN = 4
"""Parameters or types of layers, at most, that a line names."""

OWN_BACKWARD = "the stage's own backward"
"""Stands for the layers of a stage that has no taps since its backward is not the host's."""

_LITTLE = 0.1
"""The share of a stage's weight-gradient work below which a line says what has no tap."""


@dataclass(frozen=True)
class TapFindings(Value):
    """The weight gradients that can be computed apart.

    Attributes:
        left: by stage and parameter, why the layer is left to the host.
        shares: by stage, the share in [0, 1] of the weight-gradient work that taps can defer or sample.
        others: by stage, the types of the layers without a tap, those with most work first.
        keeps_forwards: whether forwards must keep their order among backwards. Either weights change within a batch, as
            where an optimizer steps in backward hooks, or a forward or a loss accumulates gradients.
        keeps_stages: whether the stages of a rank must keep their order, because they share a weight. Their gradients
            are added up in that order.
        first_step: the step of this process's first check.
        good_step: the newest step that checked all layers that have a tap.
    """

    left: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    shares: Mapping[int, Share] = field(default_factory=dict)
    others: Mapping[int, Sequence[str]] = field(default_factory=dict)
    keeps_forwards: bool = False
    keeps_stages: bool = False
    first_step: int = 0
    good_step: int = 0

    @property
    def has_unproven(self) -> bool:
        """Return whether a layer may still be proven by a later check."""
        return any(reason in PROVISIONAL for found in self.left.values() for reason in found.values())

    def apply(self, taps: Mapping[int, StageTaps], masks: StageMasks) -> None:
        """Stop tapping the layers that are left to the host. Their tokens are no longer sampled."""
        for stage in masks.stages:
            found = self.left.get(stage, {})
            if stage in taps:
                taps[stage].leave(found)
            masks.leave_unsampled(stage, found)

    def without_overhead(self, bounds: Mapping[Action, Bounds]) -> dict[Action, Bounds]:
        """Return ``bounds`` without gains on stages that have no tap: what was measured there is the cost of timing."""
        return {
            action: of if self.shares.get(action.stage, 1.0) or not action.freezable else Bounds(of.upper, of.upper)
            for action, of in bounds.items()
        }

    def lines(self) -> list[str]:
        """Return the lines of the log: one for each stage and reason, and one for each stage with few taps."""
        lines = []
        for stage, reason, names in self._left_by_reason(TapFindings()):
            lines.append(f"stage {stage}: the host itself computes the weight gradient of {names}: {reason}")
        for stage, share in self.shares.items():
            if share < _LITTLE and OWN_BACKWARD not in self.others.get(stage, ()):
                lines.append(
                    f"stage {stage}: only {share:.0%} of the weight-gradient work can wait; no tap "
                    f"for {shown(self.others.get(stage, ()))}. torch.nn.Linear and the linear layers of Megatron-Core "
                    "and Transformer Engine have one; "
                    'else use weight_gradients "in_place" with granularity "tensor"'
                )
        return lines

    def changed_lines(self, before: TapFindings) -> list[str]:
        """Return the lines about layers that are left for good now, and were not in the findings ``before``."""
        lines = []
        for stage, reason, names in self._left_by_reason(before):
            if reason not in PROVISIONAL and not reason.endswith(SAID):
                lines.append(
                    f"stage {stage}: the weight gradient of {names} is no longer what a tap computes: {reason}. The "
                    f"last check without a difference was in step {before.good_step}; gradients since then may be "
                    "wrong. From now on the host computes it"
                )
        return lines

    def _left_by_reason(self, before: TapFindings) -> Iterator[tuple[int, str, str]]:
        """Yield each stage, reason and parameters' names. Parameters that the host computed ``before`` are omitted."""
        for stage, found in self.left.items():
            earlier = before.left.get(stage, {})
            new = {name: reason for name, reason in found.items() if name not in earlier}
            for reason in dict.fromkeys(new.values()):
                yield stage, reason, shown([name for name, why in new.items() if why == reason])

    def described(self) -> str | None:
        """The share of the weight-gradient work that has a tap, in words; None without any stage."""
        if not self.shares:
            return None
        shares = dict.fromkeys(f"{share:.0%}" for share in sorted(self.shares.values()))
        span = " to ".join(list(shares)[:: max(1, len(shares) - 1)])
        return f"{span} of a stage's weight-gradient work can wait"


def agree(collectives: Collectives, pipeline: HostPipeline, accumulates_early: bool) -> TapFindings:
    """End the check of a step. Return the findings of all ranks: replicas of a stage leave the same layers.

    ``accumulates_early`` says whether a forward or a loss of this rank has accumulated gradients. Called on all ranks.
    """

    def local() -> TapFindings:
        left, shares, others = {}, {}, {}
        for stage, taps in pipeline.taps.items():
            units, reason = pipeline.units.get(stage, ()), pipeline.host_backwards.get(stage)
            left[stage] = taps.end_check()
            if reason is not None:
                left[stage] = {name: reason for unit in units for name in unit.names}
            names = taps.names - left[stage].keys()
            apart, work = _work(units, names), sum(unit.work for unit in units)
            shares[stage] = apart / work if work else 1.0
            others[stage] = _types(pipeline.models.get(stage), [u for u in units if names.isdisjoint(u.names)])
            if reason is not None:
                others[stage] = [OWN_BACKWARD]
        reasons = {reason for found in left.values() for reason in found.values()}
        by_stage = pipeline.parameters.values()
        parameters = [parameter for of_stage in by_stage for parameter in of_stage.values()]
        keeps_forwards = accumulates_early or CHANGES in reasons or may_update_in_backward(parameters)
        keeps_stages = len({*map(id, parameters)}) < sum(len({*map(id, p.values())}) for p in by_stage)
        return TapFindings(left, shares, others, keeps_forwards=keeps_forwards, keeps_stages=keeps_stages)

    return decide_from_all(collectives, local, _merge)


def _merge(ranks: Sequence[TapFindings]) -> TapFindings:
    left: dict[int, dict[str, str]] = {}
    shares: dict[int, float] = {}
    others: dict[int, Sequence[str]] = {}
    for rank in ranks:
        for stage, found in rank.left.items():
            left.setdefault(stage, {}).update(found)
            shares[stage] = min(shares.get(stage, 1.0), rank.shares[stage])
            others[stage] = others.get(stage) or rank.others[stage]
    return TapFindings(
        {stage: dict(sorted(left[stage].items())) for stage in sorted(left) if left[stage]},
        {stage: shares[stage] for stage in sorted(shares)},
        others,
        keeps_forwards=any(rank.keeps_forwards for rank in ranks),
        keeps_stages=any(rank.keeps_stages for rank in ranks),
    )


def _work(units: Sequence[FreezeUnit], names: frozenset[str]) -> float:
    return sum(unit.work for unit in units if not names.isdisjoint(unit.names))


def _types(model: Any, units: Sequence[FreezeUnit]) -> list[str]:
    """The types of the modules that hold these units' parameters, those with most work first."""
    work: Counter[str] = Counter()
    for unit in units if model is not None else ():
        work[type(model.get_submodule(unit.names[0].rpartition(".")[0])).__name__] += unit.work  # type: ignore[assignment]
    return [name for name, _ in work.most_common()]


def shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
