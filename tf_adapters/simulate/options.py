"""The options of a simulation, checked before any work."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tf_adapters.measuring.measurement import Steps
from tf_adapters.simulate.named_schedules import Sizes

_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Ratio = Annotated[float, Field(ge=0, le=1)]
_SPLIT = BeforeValidator(lambda text: [part.strip() for part in text.split(",")] if isinstance(text, str) else text)


class Options(BaseModel):
    """The arguments of ``tf-adapters simulate``. One of ``report``, ``input``, ``forward_ms`` and ``model`` is given.

    Times of stages are one value, or one for each stage. A microbatch has ``sequences`` of ``length`` tokens.
    ``extra_microbatches`` None means no deferral, or as recorded; ``steps`` None means "meet", or as recorded.
    """

    model_config = ConfigDict(frozen=True)

    report: str | None = None
    input: str | None = None
    forward_ms: Annotated[tuple[_Time, ...], _SPLIT] | None = None
    backward_ms: Annotated[tuple[_Time, ...], _SPLIT] = ()
    weight_share: Annotated[tuple[_Ratio, ...], _SPLIT] = (0.5,)
    model: str | None = None
    sequences: _Count = 2
    length: _Count = 1024
    tflops: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)] = 989.0
    schedules: tuple[str, ...] = ()
    csv: str | None = None
    microbatches: _Count | None = None
    ranks: _Count | None = None
    stages: _Count | None = None
    stages_per_rank: _Count | None = None
    communication_ms: _Time | None = None
    max_freeze_ratio: _Ratio | None = None
    sweep: Annotated[tuple[_Ratio, ...], _SPLIT] = ()
    extra_microbatches: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    steps: Steps | None = None

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.microbatches, self.ranks, self.stages, self.stages_per_rank)
