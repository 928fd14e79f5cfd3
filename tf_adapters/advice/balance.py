"""The layers of a measured run with their times, and a better cut of them into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean

from tf_adapters.advice.partition import CutPipeline, Cuts, Piece
from tf_adapters.errors import ConfigError
from tf_adapters.measuring.measurement import Measurement
from tf_adapters.report.schema import Report
from tf_adapters.schedule.ir import Kind, PipelineSchedule

_GAIN = 0.005  # least share by which moving a layer must shorten the batch: the times are not known more exactly


@dataclass(frozen=True)
class Cut:
    """One cut of the model. By stage: its layers, the elements of their parameters, and ms of (forward, backward)."""

    layers: tuple[tuple[str, ...], ...]
    parameters: tuple[int, ...]
    stage_ms: tuple[tuple[float, float], ...]
    makespan_ms: float


@dataclass(frozen=True)
class Balance:
    """The present cut of the model and the best one. They are the same if moving layers would gain too little."""

    schedule: PipelineSchedule
    now: Cut
    best: Cut
    step_ms: float | None  # with nothing frozen; None if it was not measured

    @property
    def moves(self) -> bool:
        """Return whether another cut is better."""
        return self.best.layers != self.now.layers

    @property
    def best_step_ms(self) -> float | None:
        """The predicted step. Its part that is no pipeline computation stays as measured."""
        return None if self.step_ms is None else self.step_ms + self.best.makespan_ms - self.now.makespan_ms

    @property
    def gain(self) -> float:
        """Speedup of a step with the best cut; of the batch if no step was measured."""
        if self.step_ms is None or not self.best_step_ms:
            return self.now.makespan_ms / self.best.makespan_ms if self.best.makespan_ms else 1.0
        return self.step_ms / self.best_step_ms


def balance(report: Report) -> Balance:
    """Find the best cut of the model of a measured run. Raises ConfigError if its layers were not timed."""
    known = report.measurement
    stages = [_stage_times(report, stage) for stage in range(known.schedule.num_stages)]
    of_stages, rest, halves = zip(*stages, strict=True)
    pieces = [piece for of_stage in of_stages for piece in of_stage]
    pipeline = CutPipeline(known.dag, pieces=pieces, rest=rest, halves=halves)
    present: Cuts = tuple(accumulate(map(len, of_stages[:-1])))
    best = pipeline.best_cuts(present)
    if pipeline.span_ms(best) > (1.0 - _GAIN) * pipeline.span_ms(present):
        best = present
    now, then = (_cut(pipeline, pieces, cuts) for cuts in (present, best))
    return Balance(known.schedule, now, then, report.measured.step_ms_unfrozen)


def _stage_times(report: Report, stage: int) -> tuple[tuple[Piece, ...], Piece, float]:
    """A stage's pieces, the rest of its time, and the share of its backward that is the input gradient.

    The times are scaled so that they add up to the stage's times in monitoring.
    """
    layers = report.layers.get(str(stage))
    if layers is None or not layers.layers:
        raise ConfigError(
            f"layers: none of stage {stage} was timed: that takes a warm-up of at least one step "
            "(timely_freeze.warmup_steps) and layers that are not compiled"
        )
    means = {kind: _mean(report.measurement, stage, kind) for kind in Kind}
    backward = means[Kind.BACKWARD] + means[Kind.INPUT_GRAD] + means[Kind.WEIGHT_GRAD]
    forward_ms = sum([*(layer.forward_ms for layer in layers.layers), layers.rest_forward_ms])
    backward_ms = sum([*(layer.backward_ms for layer in layers.layers), layers.rest_backward_ms])
    forward_scale = means[Kind.FORWARD] / forward_ms if forward_ms else 0.0
    backward_scale = backward / backward_ms if backward_ms else 0.0
    pieces = [
        Piece((of.name,), of.forward_ms * forward_scale, of.backward_ms * backward_scale, of.parameters)
        for of in layers.layers
    ]
    rest = Piece((), layers.rest_forward_ms * forward_scale, layers.rest_backward_ms * backward_scale)
    return _together(pieces, report.host.name), rest, means[Kind.INPUT_GRAD] / backward if backward else 0.0


def _mean(known: Measurement, stage: int, kind: Kind) -> float:
    values = [ms for action, ms in known.upper.items() if action.stage == stage and action.kind is kind]
    return fmean(values) if values else 0.0


def _together(pieces: Sequence[Piece], host: str) -> tuple[Piece, ...]:
    """Join the layers that the host keeps together: Megatron's norm and output follow its last decoder layer."""
    decoders = [place for place, piece in enumerate(pieces) if ".layers." in piece.names[0]]
    if host != "megatron-core" or not decoders or decoders[-1] + 1 == len(pieces):
        return tuple(pieces)
    after = pieces[decoders[-1] + 1 :]
    joined = Piece(
        names=tuple(name for piece in after for name in piece.names),
        forward_ms=sum(piece.forward_ms for piece in after),
        backward_ms=sum(piece.backward_ms for piece in after),
        parameters=sum(piece.parameters for piece in after),
    )
    return (*pieces[: -len(after)], joined)


def _cut(pipeline: CutPipeline, pieces: Sequence[Piece], cuts: Cuts) -> Cut:
    parts = [pieces[start:stop] for start, stop in pairwise((0, *cuts, len(pieces)))]
    return Cut(
        layers=tuple(tuple(name for piece in part for name in piece.names) for part in parts),
        parameters=tuple(sum(piece.parameters for piece in part) for part in parts),
        stage_ms=pipeline.stage_times(cuts),
        makespan_ms=pipeline.span_ms(cuts),
    )
