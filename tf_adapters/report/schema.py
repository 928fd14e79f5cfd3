"""The report.json that rank 0 leaves: typed, written atomically, read with errors of one line.

Times are milliseconds, memory is bytes, freeze ratios are shares in [0, 1]. Keys that are not known here
are ignored, so that a newer version may add some without a new format number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from tf_adapters.errors import ConfigError, PlanInputError, first_problem
from tf_adapters.measuring.batch_times import BatchTimes
from tf_adapters.measuring.control_steps import LEAST
from tf_adapters.measuring.layer_times import StageLayers
from tf_adapters.measuring.measurement import Measurement, Steps
from tf_adapters.measuring.transfers import Gaps
from tf_adapters.planner.freeze_plan import FreezePlan
from tf_adapters.schedule.durations import Count, Milliseconds, Order, Quotient, Share

FORMAT: Literal[1] = 1

Status = Literal["warmup", "monitoring", "planning", "planned", "progressive", "stable", "disabled", "failed"]
Plan = Annotated[FreezePlan, PlainSerializer(lambda plan: plan.to_json())]
Schedule = Annotated[
    Order,
    BeforeValidator(lambda value: value["ranks"] if isinstance(value, Mapping) and "ranks" in value else value),
    PlainSerializer(lambda schedule: {"ranks": schedule.to_text()}),
]
"""Not validated: a run that failed for its schedule must be able to say so."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_defaults(cls, data: Any) -> Any:
        """An absent part may be spelt null: what has a default takes it."""
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None}


class Host(_Model):
    """The framework that ran the pipeline, and its device ("cpu", "cuda", "emulated"; None in old reports)."""

    name: str
    version: str
    device: str | None = None

    @property
    def emulated(self) -> bool:
        """Return whether times are those of an emulated device. Whoever shows them has to say so."""
        return self.device == "emulated"

    def __str__(self) -> str:
        return f"{self.name} {self.version}{' on emulated devices' if self.emulated else ''}"


class Phases(_Model):
    """Last step of each phase: the paper's T_w, T_m and T_f; None before the run knows them."""

    warmup_end: int | None = None
    monitoring_end: int | None = None
    progressive_end: int | None = None

    def named(self) -> tuple[tuple[str, int | None], ...]:
        """Return each phase's name and last step, in order."""
        return ("warm-up", self.warmup_end), ("monitoring", self.monitoring_end), ("progressive", self.progressive_end)


class BackwardSample(_Model):
    """Time ``ms`` of one backward ``action``, the share ``afr`` of its freezable weight gradients skipped.

    A median over a ``phase``; of mixed monitoring, in which each step draws another share, single samples. A few masks
    under ``freeze_limits`` may freeze somewhat more than a ratio of 1 does on average.
    """

    action: str
    afr: Quotient
    ms: Milliseconds
    phase: str | None = None


class PeakMemory(_Model):
    """Most bytes that each pipeline rank held at the ends of its actions (``timing.memory``).

    ``unfrozen``: while monitoring with nothing frozen; ``stable``: in stable freezing; ``planned``: the most that the
    plan's order takes, where it is not the host's.
    """

    unfrozen: tuple[Count, ...] | None = None
    planned: tuple[Count, ...] | None = None
    stable: tuple[Count, ...] | None = None


class SampledTokens(_Model):
    """The sampled tokens of one stage: the mean share that the plan keeps, and the cost of a sample.

    A sampled product takes ``fixed + per_token * kept`` of the time of the whole product.
    """

    kept: Share
    fixed: Quotient
    per_token: Quotient


class Batches(_Model):
    """Batches of one number of microbatches: how many steps had one, and a step with nothing frozen and as planned."""

    steps: Count
    step_ms_unfrozen: Milliseconds
    planned_step_ms: Milliseconds


class Measured(_Model):
    """The measurements of the run. None, or empty, means not measured yet.

    ``step_ratio`` is stable over unfrozen step time; ``planned_ratio`` the same for the planned step, with the measured
    part that is no pipeline computation. Both are over steps of monitoring, which may be slower than the host:
    neither says what a run gains. ``forward_pace`` is how many times as long forwards take in
    the stable phase as when the plan's times were measured: they do not freeze, so that is the machine. ``speedup`` is
    over the host alone: the median of ``control_steps`` comparisons, with its 95% interval. ``host_step_ms`` is the
    median step of the host in them.
    """

    step_ms_unfrozen: Milliseconds | None = None
    step_ms_stable: Milliseconds | None = None
    step_ratio: Quotient | None = None
    forward_pace: Quotient | None = None
    planned_step_ms: Milliseconds | None = None
    planned_ratio: Quotient | None = None
    host_step_ms: Milliseconds | None = None
    speedup: Quotient | None = None
    speedup_interval: tuple[Quotient, Quotient] | None = None
    control_steps: Count = 0
    mean_afr: dict[str, Quotient] = Field(default_factory=dict)
    backward_ms: tuple[BackwardSample, ...] = ()
    peak_memory_bytes: PeakMemory = PeakMemory()


class Report(_Model):
    """One run, as far as it has come. ``times`` holds [all frozen, nothing frozen] ms for each action.

    ``frozen_share`` holds, by stage, the mean share frozen in steps 1, 2, .... ``parameter_freeze_ratio`` holds, by
    stage and name, the share of stable freezing's microbatches in which a parameter was frozen (a tied weight: on all
    of its stages). ``tapped_share`` is by stage, where weight gradients are deferred or sampled: the share of their
    work that can be. ``copied_bytes`` is by stage: what a step copies since others could have changed what waits for
    its weight gradient. ``compilations`` counts the graphs that torch.compile has made up to the "first_step" of the
    process and "later", on the rank with most of the latter; empty without any. ``tokens`` is by stage, where they
    are sampled. ``layers`` holds, by stage, the times of its layers in the warm-up. ``batches`` is by number of
    microbatches, where they are mixed: all else is of the number that most steps had. ``batch_times`` is where the
    ranks' time goes with nothing frozen. ``steps`` says whether ranks "meet" between steps or steps "overlap"; if
    they overlap, ``between_steps`` has each rank's time between steps in ms. ``moves_forwards`` says whether a plan
    may change the host's order of forwards and input gradients. All may be left out.
    """

    format: Literal[1] = FORMAT
    host: Host
    versions: dict[str, str | None] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    schedule: Schedule
    status: Status
    note: tuple[str, ...] = ()
    step: int = Field(ge=0)
    phases: Phases = Phases()
    times: dict[str, tuple[Milliseconds, Milliseconds]] = Field(default_factory=dict)
    communication: dict[str, Milliseconds] = Field(default_factory=dict)
    overhead: dict[str, Milliseconds] = Field(default_factory=dict)
    waits: dict[str, Milliseconds] = Field(default_factory=dict)
    plan: Plan | None = None
    measured: Measured = Measured()
    frozen_share: dict[str, tuple[Quotient, ...]] = Field(default_factory=dict)
    parameter_freeze_ratio: dict[str, dict[str, Share]] = Field(default_factory=dict)
    tapped_share: dict[str, Share] = Field(default_factory=dict)
    copied_bytes: dict[str, int] = Field(default_factory=dict)
    compilations: dict[str, Count] = Field(default_factory=dict)
    tokens: dict[str, SampledTokens] = Field(default_factory=dict)
    layers: dict[str, StageLayers] = Field(default_factory=dict)
    batches: dict[str, Batches] = Field(default_factory=dict)
    batch_times: BatchTimes | None = None
    steps: Steps = "meet"
    between_steps: dict[str, Milliseconds] = Field(default_factory=dict)
    moves_forwards: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values; the inverse of ``from_json``."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Read plain JSON values. Raises ConfigError: one line that names the first wrong field."""
        _check_is_report(data)
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise ConfigError(first_problem(error)) from None
        except UnicodeEncodeError as error:
            raise ConfigError(f"a text in the report is no Unicode ({error.reason})") from None

    @cached_property
    def measurement(self) -> Measurement:
        """Return the planner's input. Raises ConfigError for values that do not fit, or if no action was timed yet."""
        if not self.times:
            raise ConfigError(f"no action has been timed yet (status {self.status!r})")
        facts = {
            "schedule": self.schedule,
            **{name: getattr(self, name) for name in ("times", *Gaps._fields, "batch_times", "steps", "between_steps")},
            "token_costs": {stage: [of.fixed, of.per_token] for stage, of in self.tokens.items()},
            "unfrozen_step_ms": self.measured.step_ms_unfrozen or 0.0,
        }
        try:
            return Measurement.from_json(facts)
        except PlanInputError as error:
            raise ConfigError(str(error)) from None

    @property
    def forwards_may_move(self) -> bool:
        """Return whether a plan may move forwards.

        Reports of earlier versions do not say it. There it is taken to be possible if each rank has one stage: every
        host can do that, and not every host can with several stages.
        """
        if self.moves_forwards is not None:
            return self.moves_forwards
        return self.schedule.num_stages <= len(self.schedule.ranks)

    @property
    def freezes(self) -> bool:
        """Return whether the plan or an earlier one freezes anything. Before there is a plan: whether it may."""
        if self.plan is None:
            return self.max_freeze_ratio != 0.0
        return self.plan.mean_freeze_ratio > 0.0 or any(self.measured.mean_afr.values())

    @property
    def has_own_order(self) -> bool:
        """Return whether the plan has an order of its own, in which weight gradients are deferred."""
        return self.plan is not None and self.plan.schedule not in (None, self.schedule)

    @property
    def baseline(self) -> str:
        """What control steps run, in words. The host alone can run neither a V nor our GPipe."""
        order = "V" if self.config.get("placement") == "v" else "GPipe"
        if order == "GPipe" and self.config.get("schedule") != "gpipe":
            return "the host alone"
        return f"the same {order} {'with nothing skipped' if self.freezes else 'without deferral'}"

    @property
    def speed(self) -> str:
        """The measured speedup in words, or why there is none. It is always the one over control steps."""
        measured, plan = self.measured, self.plan
        if measured.speedup is not None and measured.speedup_interval is not None:
            low, high = measured.speedup_interval
            if low < 1.0 < high:
                found = f"{measured.control_steps} control steps ({low:.2f}x to {high:.2f}x)"
                return f"no difference to {self.baseline} is shown by {found}"
            return (
                f"{measured.speedup:.2f}x as fast as {self.baseline} ({low:.2f}x to {high:.2f}x; "
                f"{measured.host_step_ms:.1f} ms in {measured.control_steps} control steps)"
            )
        if plan is not None and not plan.changes(self.schedule):
            return f"every step runs as {self.baseline}"
        if plan is None or self.schedule.splits_backwards:
            return f"the speed over {self.baseline} is not measured"
        unknown = f"the speed over {self.baseline} is not known yet"
        return f"{unknown}: {measured.control_steps} of {LEAST} control steps have run"

    @property
    def max_freeze_ratio(self) -> float | None:
        """The run's r_max, in [0, 1]; None where it is not known, or "auto" in a report of an earlier version."""
        ratio = self.config.get("max_freeze_ratio")
        return float(ratio) if isinstance(ratio, (int, float)) and 0.0 <= ratio <= 1.0 else None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write to ``path``, making its folders. A reader sees the old report or the new one."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), text)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report file. Raises ConfigError with one line that names the file and the problem."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not JSON ({error})") from None


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the whole new one, never a part."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a device or a pipe must not be replaced by a file
        return
    # Beside the target: os.replace is atomic only within one file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _check_is_report(data: object) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError("this is not a report: a report is a JSON object")
    if "format" not in data:
        if {"makespan_ms", "freeze_ratio"} <= data.keys():
            raise ConfigError("this is a plan and not the report.json that a run leaves")
        if {"ranks", "times"} <= data.keys():
            raise ConfigError("this is input for the planner and not the report.json that a run leaves")
        raise ConfigError('this is not a report: it has no field "format"')
    number = data["format"]
    if isinstance(number, bool) or not isinstance(number, int):
        raise ConfigError(f"format is {number!r}: it must be an integer")
    if number > FORMAT:
        raise ConfigError(f"format {number} is newer than this version reads ({FORMAT}): update tf-adapters")
