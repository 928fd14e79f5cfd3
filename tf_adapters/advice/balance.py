"""A run's report as layers with their times, and where they had better be cut into stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from tf_adapters.advice.partition import CutPipeline, Cuts, Piece
from tf_adapters.errors import ConfigError
from tf_adapters.measuring.layer_times import StageLayers
from tf_adapters.report.schema import Report
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

__all__ = ["Balance", "Cut", "balance"]

_GAIN = 0.005
"""A shorter step than this share is no reason to move a layer: the times are measured no better."""


@dataclass(frozen=True)
class Cut:
    """One way to cut the model. By stage: its layers, their parameters' elements, ms of a microbatch there."""

    layers: tuple[tuple[str, ...], ...]
    parameters: tuple[int, ...]
    stage_ms: tuple[tuple[float, float], ...]
    makespan_ms: float


@dataclass(frozen=True)
class Balance:
    """The model as it is cut and as it had better be, which is the same where moving layers brings next to nothing.

    ``step_ms`` is the measured step, nothing frozen; None where it was not measured.
    """

    schedule: PipelineSchedule
    now: Cut
    best: Cut
    step_ms: float | None

    @property
    def moves(self) -> bool:
        """Return whether another cut is better."""
        return self.best.layers != self.now.layers

    @property
    def best_step_ms(self) -> float | None:
        """The predicted step: what is no pipeline computation stays."""
        return None if self.step_ms is None else self.step_ms + self.best.makespan_ms - self.now.makespan_ms

    @property
    def gain(self) -> float:
        """Speedup of a step with the best cut; of the batch if no step was measured."""
        if self.step_ms is None or not self.best_step_ms:
            return self.now.makespan_ms / self.best.makespan_ms if self.best.makespan_ms else 1.0
        return self.step_ms / self.best_step_ms


def balance(report: Report) -> Balance:
    """Cut the model that a run has measured anew. Raises ConfigError where its layers were not timed."""
    known = report.measurement
    schedule, upper = known.schedule, known.upper
    stages = [
        _StageTimes.of(report.layers.get(str(stage)), schedule, upper, stage) for stage in range(schedule.num_stages)
    ]
    pieces = [piece for stage in stages for piece in _together(stage.pieces, report.host.name)]
    sizes = [len(_together(stage.pieces, report.host.name)) for stage in stages]
    pipeline = CutPipeline(
        known.dag, pieces=pieces, rest=[stage.rest for stage in stages], halves=[s.half for s in stages]
    )
    present: Cuts = tuple(accumulate(sizes[:-1]))
    best = pipeline.best_cuts(present)
    if pipeline.span_ms(best) > (1.0 - _GAIN) * pipeline.span_ms(present):
        best = present
    now, then = (_cut(pipeline, pieces, cuts) for cuts in (present, best))
    return Balance(schedule, now, then, report.measured.step_ms_unfrozen)


@dataclass(frozen=True)
class _StageTimes:
    """A stage's layers as long as monitoring says that the stage takes; ``half``: its backward's input gradient."""

    pieces: tuple[Piece, ...]
    rest: Piece
    half: float

    @classmethod
    def of(
        cls, layers: StageLayers | None, schedule: PipelineSchedule, upper: Mapping[Action, float], stage: int
    ) -> _StageTimes:
        if layers is None or not layers.layers:
            raise ConfigError(
                f"layers: none of stage {stage} was timed: that takes a warm-up of at least one step "
                "(timely_freeze.warmup_steps) and layers that are not compiled"
            )
        means = {kind: _mean(upper, schedule, stage, kind) for kind in Kind}
        backward = means[Kind.BACKWARD] + means[Kind.INPUT_GRAD] + means[Kind.WEIGHT_GRAD]
        forwards = [layer.forward_ms for layer in layers.layers]
        backwards = [layer.backward_ms for layer in layers.layers]
        forward_scale = _scale(means[Kind.FORWARD], [*forwards, layers.rest_forward_ms])
        backward_scale = _scale(backward, [*backwards, layers.rest_backward_ms])
        return cls(
            tuple(
                Piece((of.name,), of.forward_ms * forward_scale, of.backward_ms * backward_scale, of.parameters)
                for of in layers.layers
            ),
            Piece((), layers.rest_forward_ms * forward_scale, layers.rest_backward_ms * backward_scale),
            means[Kind.INPUT_GRAD] / backward if backward else 0.0,
        )


def _mean(upper: Mapping[Action, float], schedule: PipelineSchedule, stage: int, kind: Kind) -> float:
    values = [upper[a] for a in schedule.actions if a.stage == stage and a.kind is kind and a in upper]
    return fmean(values) if values else 0.0


def _scale(whole: float, parts: Sequence[float]) -> float:
    """The factor by which parts of another moment are multiplied, so that they add up to the whole."""
    return whole / sum(parts) if sum(parts) else 0.0


def _together(pieces: Sequence[Piece], host: str) -> tuple[Piece, ...]:
    """Layers that the host keeps together: what follows Megatron's last decoder layer, its norm and its output."""
    if host != "megatron-core":
        return tuple(pieces)
    last = max((place for place, piece in enumerate(pieces) if ".layers." in piece.names[0]), default=len(pieces))
    return (*pieces[: last + 1], *_joined(pieces[last + 1 :]))


def _joined(pieces: Sequence[Piece]) -> Iterable[Piece]:
    if pieces:
        yield Piece(
            names=tuple(name for piece in pieces for name in piece.names),
            forward_ms=sum(piece.forward_ms for piece in pieces),
            backward_ms=sum(piece.backward_ms for piece in pieces),
            parameters=sum(piece.parameters for piece in pieces),
        )


def _cut(pipeline: CutPipeline, pieces: Sequence[Piece], cuts: Cuts) -> Cut:
    parts = [pieces[start:stop] for start, stop in pairwise((0, *cuts, len(pieces)))]
    return Cut(
        layers=tuple(tuple(name for piece in part for name in piece.names) for part in parts),
        parameters=tuple(sum(piece.parameters for piece in part) for part in parts),
        stage_ms=pipeline.stage_times(cuts),
        makespan_ms=pipeline.span_ms(cuts),
    )
