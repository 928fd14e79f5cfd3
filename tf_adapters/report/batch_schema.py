"""A report's ``batch_times``: where the ranks' time goes with nothing frozen, as plain JSON values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainSerializer, PlainValidator, ValidationError

from tf_adapters.timing.batch_times import BatchTimes

__all__ = ["Batch"]

_Milliseconds = Annotated[float, Field(ge=0, le=1e15)]
_Index = Annotated[int, Field(ge=0)]
_Kind = Literal["F", "B", "I", "W"]


class _Rank(BaseModel):
    compute_ms: dict[_Kind, _Milliseconds]
    transfer_ms: _Milliseconds
    overhead_ms: _Milliseconds
    waiting_ms: _Milliseconds


class _Edge(BaseModel):
    source: _Index
    target: _Index
    kind: _Kind
    waiting_ms: _Milliseconds
    transfer_ms: _Milliseconds
    late_ms: _Milliseconds


class _Critical(BaseModel):
    stage: _Index
    kind: _Kind
    ms: _Milliseconds


class _Straggler(BaseModel):
    stage: _Index
    rank: _Index
    slowest_ms: _Milliseconds
    median_ms: _Milliseconds
    cost_ms: _Milliseconds


class _Numbers(BaseModel):
    """The numbers of a batch in a report, which ``BatchTimes`` takes as they are."""

    steps: Annotated[int, Field(ge=1)]
    span_ms: _Milliseconds
    ranks: list[_Rank]
    edges: list[_Edge] = []
    critical_path: list[_Critical] = []
    critical_transfer_ms: _Milliseconds = 0.0
    critical_overhead_ms: _Milliseconds = 0.0
    replicas: Annotated[int, Field(ge=1)] = 1
    replica_spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    stragglers: list[_Straggler] = []


def _to_batch(value: Any) -> BatchTimes:
    if isinstance(value, BatchTimes):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("expected the batch as an object")
    try:
        return BatchTimes.from_json(_Numbers.model_validate(dict(value)).model_dump())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise ValueError(f"not a batch ({field}: {problem['msg']})") from None


Batch = Annotated[BatchTimes, PlainValidator(_to_batch), PlainSerializer(lambda batch: batch.to_json())]
