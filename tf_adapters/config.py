"""TimelyFreezeConfig: the one schema behind the JSON section, the arguments and the Python call.

A field ``x_y`` is ``"x_y"`` in a ``timely_freeze`` JSON section, ``x_y=`` in Python and ``--timely-freeze-x-y`` on a
command line (``tf_adapters.arguments``).
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tf_adapters.errors import ConfigError
from tf_adapters.goals import Goal, contradicting, fallbacks, with_goal
from tf_adapters.log import announce
from tf_adapters.schemas import in_words, quoted, unknown_keys

SECTION = "timely_freeze"

_Steps = Annotated[int, Field(le=10**9)]
"""Steps or microbatches, at most more than any run has."""

_MOST_SECONDS, _MOST_GIB, _MOST_TIMES = 1e6, 1e6, 1e9
"""The largest finite numbers that settings take: beyond any use, and small enough for alarms, solvers and JSON."""

RETIRED = {
    "target_step_time_ms": "give target_speedup, the unfrozen step's time over the one that you want",
    "monitoring_masks": 'to freeze nothing while measuring, give method "none" and max_freeze_ratio 0.0',
    "apf_alpha": "leave it out: APF's alpha is 0.99",
    "apf_score": "leave it out: a tensor's score is its mean update's",
    "plan_wait": "leave it out: training waits for the plans of up to 1,000 actions",
    "report_every": "give replan_interval, after which the report is written too",
}
"""Settings of version 0.1.0 that have no effect any more, and what to do instead. The next version refuses them."""

REMOVED = {
    "optimizer_step": "updates are the host's own again. Leave it out; jobs that clip gradients still gain from "
    "deferral within a step"
}
"""Settings that are refused with any value, and what to do instead."""


class TimelyFreezeConfig(BaseModel):
    """Settings of one training run. Steps are optimizer steps, ratios are shares in [0, 1].

    The phases follow each other (paper section 3): ``warmup_steps`` (T_w), then ``monitoring_steps``
    (T_m - T_w), then ``progressive_steps`` (T_f - T_m), then stable freezing to the end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(True, description="false leaves the host exactly as it is")
    goal: Goal | None = Field(
        None,
        description="what a run is for; exact: the host's bits, sooner; paper: TimelyFreeze as published; your own "
        "settings override it; by default exact, unless one asks to freeze",
    )
    method: Literal["timely", "timely+apf", "timely+autofreeze", "apf", "autofreeze", "none"] = Field(
        "timely",
        description="timely: planned ratios, uniform selection; timely+apf, timely+autofreeze: planned ratios, what "
        "is stable is frozen first; apf, autofreeze: what is stable, without a plan; none: measure, plan and report, "
        "then freeze nothing",
    )
    max_freeze_ratio: float = Field(
        0.8, ge=0, le=1, description="r_max: the mean freeze ratio that no stage exceeds; 0 freezes nothing"
    )
    target_speedup: Annotated[float, Field(ge=1, le=_MOST_TIMES)] | None = Field(
        None, description="freeze the least that makes a step this many times as fast; by default, as fast as can be"
    )
    freeze_exclude: list[str] = Field(
        [],
        description="patterns (*, ?, [abc]) of parameters' names: what they match is never frozen",
        json_schema_extra={"allowed": 'a list of names with *, ? and [abc], such as ["*.bias", "embed*"]'},
    )
    freeze_limits: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        {},
        description="a lower max_freeze_ratio for the parameters that a pattern matches",
        json_schema_extra={
            "allowed": 'an object of patterns and ratios from 0 to max_freeze_ratio, such as {"*embed*": 0.2}'
        },
    )
    granularity: Literal["tensor", "token", "block"] = Field(
        "tensor",
        description="tensor: whole weight gradients are skipped; token: those of linear layers are computed from a "
        "sample of their tokens, unbiased; a larger freeze ratio makes it smaller; block: whole layers are frozen, "
        "which may be compiled with torch.compile",
    )
    weight_gradients: Literal["in_place", "deferred"] = Field(
        "in_place",
        description="in_place: each backward computes them, as the host does; deferred: they are computed while the "
        "rank would idle (exact: the same gradients), and only those that do not fit there may be frozen",
    )
    extra_microbatches: Literal["auto"] | Annotated[_Steps, Field(ge=-(10**9))] = Field(
        0,
        description="deferred: how many microbatches more than the host's fullest rank a rank may hold; below 0, so "
        'many fewer; "auto" takes as many as fit into each rank\'s memory',
    )
    memory_limit: Annotated[float, Field(gt=0, le=_MOST_GIB)] | None = Field(
        None,
        description='extra_microbatches "auto": GiB that the tensors of a rank may fill, also below what the host '
        "needs; by default nine tenths of what its device has for them",
    )
    gradient_scale: Literal["skipped_as_zero", "computed_mean"] = Field(
        "skipped_as_zero",
        description="skipped_as_zero: a skipped gradient counts as zero in the mean over microbatches, as in the "
        "paper; computed_mean: a gradient is the mean over the microbatches that computed it",
    )
    warmup_steps: Literal["auto"] | Annotated[_Steps, Field(ge=0)] = Field(
        "auto", description='T_w; "auto" takes the learning-rate warm-up of the host\'s scheduler'
    )
    monitoring: Literal["mixed", "halves"] = Field(
        "mixed",
        description="mixed: every second step draws freeze ratios, and monitoring ends once it is precise; halves: as "
        "in the paper, nothing frozen in the first half, everything in the second",
    )
    monitoring_steps: _Steps = Field(40, ge=2, description="steps of monitoring; mixed monitoring may need fewer")
    monitoring_precision: float = Field(0.02, gt=0, le=1, description="relative error that ends mixed monitoring")
    progressive_steps: _Steps = Field(50, ge=0, description="steps over which the freeze ratios rise to the plan's")
    stability_check_interval: _Steps = Field(
        50, ge=1, description="steps between the stability checks of APF and AutoFreeze"
    )
    apf_threshold: float = Field(0.01, ge=0, le=1, description="T_APF: a score below it is stable")
    autofreeze_percentile: float = Field(
        80.0, ge=0, le=100, description="P_Auto: percentage of the layers that may count as stable"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="masks are a function of (seed, step, stage, microbatch)")
    placement: Literal["host", "v"] = Field(
        "host",
        description='where stages are; "v" puts two on each rank, so that one rank has the first and the last one '
        "(Megatron-Core, DeepSpeed)",
    )
    schedule: Literal["host", "1f1b", "gpipe"] = Field(
        "host", description='the pipeline schedule to run; "host" keeps the one the host runs'
    )
    on_error: Literal["warn", "raise"] = Field(
        "warn", description="an error of ours: warn and train as the host alone, or raise it on all ranks"
    )
    replan_threshold: float = Field(
        0.1,
        ge=0,
        le=_MOST_TIMES,
        description="relative change of the measured times from which a new plan is made; 0: never",
    )
    replan_interval: _Steps = Field(
        100, ge=1, description="steps of stable freezing between checks of the times, and between updates of the report"
    )
    solver_time_limit_s: float = Field(300.0, gt=0, le=_MOST_SECONDS, description="seconds the planner may take")
    output_dir: str = Field(
        ".",
        description="the report is written to <output_dir>/timely_freeze/report.json",
        json_schema_extra={"allowed": "a path"},
    )
    nvtx: bool = Field(False, description="name each action in a profile of NVIDIA Nsight Systems (CUDA only)")

    def __init__(self, **settings: Any) -> None:
        """Raise ConfigError, one line with each wrong setting, its value and what is allowed."""
        settings = _without_retired(settings)
        if (name := contradicting(settings)) is not None:
            raise ConfigError(
                f'{SECTION}.goal is "exact" and {SECTION}.{name} is {settings[name]!r}, which changes gradients: leave '
                f'{name} out, or choose goal "paper"'
            )
        settings = with_goal(settings)
        unknown = [key for key in settings if key not in type(self).model_fields]
        if unknown:
            raise ConfigError(unknown_keys(SECTION, unknown, tuple(type(self).model_fields)))
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(_describe(error))) from None
        self._check_together()

    def _check_together(self) -> None:
        """Raise ConfigError if settings contradict each other."""
        deferred, or_deferred = self.weight_gradients == "deferred", 'or weight_gradients "deferred"'
        if self.samples_tokens and self.method not in ("timely", "none"):
            why = "since it chooses what to freeze whole"
            self._refuse_both("granularity", "method", f'"tensor" or "block" with it, {why}')
        if deferred and not self.plans:
            self._refuse_both("weight_gradients", "method", '"in_place" with it, since deferral needs a plan')
        if self.extra_microbatches and not deferred:
            self._refuse_both("extra_microbatches", "weight_gradients", f"0, {or_deferred}")
        if self.memory_limit is not None and not self.fills_memory:
            self._refuse_both("memory_limit", "extra_microbatches", 'null, or extra_microbatches "auto"')
        goal = f' with goal "{self.goal}"' if self.goal else ""
        for pattern, limit in self.freeze_limits.items():
            if self.plans and limit > self.max_freeze_ratio:
                raise ConfigError(
                    f"{_limit_of(pattern)} is {limit}: allowed is a number from 0 to {SECTION}.max_freeze_ratio, "
                    f"which is {self.max_freeze_ratio}{goal}"
                )

    def _refuse_both(self, name: str, other: str, allowed: str) -> NoReturn:
        value, beside = _shown(getattr(self, name)), _shown(getattr(self, other))
        raise ConfigError(f"{SECTION}.{name} is {value} and {SECTION}.{other} is {beside}: allowed is {allowed}")

    def fallbacks(self) -> Iterator[TimelyFreezeConfig]:
        """Yield these settings, then those that a host may run instead, nearest to the goal first."""
        for change in fallbacks(dict(self)):
            yield self.model_copy(update=change)

    @property
    def fills_memory(self) -> bool:
        return self.extra_microbatches == "auto"

    @property
    def saves_memory(self) -> bool:
        """Return whether ranks may hold fewer microbatches than the host's fullest one."""
        return self.extra_microbatches != "auto" and self.extra_microbatches < 0

    @property
    def deferral_limits(self) -> dict[str, Any]:
        """Return the planner's limits on microbatches in flight."""
        extra = 0 if self.extra_microbatches == "auto" else self.extra_microbatches
        return {"defer": self.defers, "extra_microbatches": extra, "fills_memory": self.fills_memory}

    @property
    def memory_limit_bytes(self) -> float | None:
        return None if self.memory_limit is None else self.memory_limit * 2**30

    @property
    def stability_metric(self) -> Literal["apf", "autofreeze"] | None:
        """Return the metric that finds stable parameters; None if the method has no such metric."""
        if self.method in ("apf", "timely+apf"):
            return "apf"
        return "autofreeze" if self.method in ("autofreeze", "timely+autofreeze") else None

    @property
    def plans(self) -> bool:
        """Return whether the pipeline is monitored and planned. APF and AutoFreeze alone need neither."""
        return self.method not in ("apf", "autofreeze")

    @property
    def freezes(self) -> bool:
        """Return whether the run may skip or sample weight gradients once it has been monitored."""
        return self.method != "none" and self.max_freeze_ratio > 0

    @property
    def monitors_with_masks(self) -> bool:
        """Return whether monitoring freezes, to measure the savings of freezing.

        Deferral without sampling needs no masks: backwards compute their weight gradients last, and this part is timed.
        """
        return self.max_freeze_ratio > 0 and not (self.defers and not self.samples_tokens)

    @property
    def defers(self) -> bool:
        """Return whether the plan may defer weight gradients."""
        return self.weight_gradients == "deferred" and self.method != "none"

    @property
    def samples_tokens(self) -> bool:
        return self.granularity == "token"

    @property
    def masks_parameters(self) -> bool:
        """Return whether whole parameters may be frozen, for which torch.compile would compile again."""
        return self.max_freeze_ratio != 0.0 and not self.samples_tokens

    @property
    def freezes_blocks(self) -> bool:
        return self.granularity == "block"

    @property
    def splits_backwards(self) -> bool:
        """Return whether linear layers compute their weight gradients separately from the host's backward."""
        return self.defers or self.samples_tokens

    @property
    def without_split(self) -> str:
        """Return advice: the settings with which layers compute weight gradients in the host's backward."""
        advice = ['granularity "tensor"'] if self.samples_tokens else []
        advice += ['weight_gradients "in_place"'] if self.weight_gradients == "deferred" else []
        return " and ".join(advice)

    @property
    def freeze_caps(self) -> dict[str, float]:
        """Return each pattern's limit divided by ``max_freeze_ratio``, in [0, 1]; without a plan the limit itself."""
        full = self.max_freeze_ratio if self.plans else 1.0
        return {pattern: limit / full if full else 0.0 for pattern, limit in self.freeze_limits.items()}

    @property
    def report_path(self) -> Path:
        return Path(self.output_dir) / SECTION / "report.json"

    def reporting_in(self, folder: str | Path) -> TimelyFreezeConfig:
        """Return these settings with reports in ``folder``, unless they name another one."""
        if self.output_dir != TimelyFreezeConfig.model_fields["output_dir"].default:
            return self
        return self.model_copy(update={"output_dir": str(folder)})

    def target_ms(self, unfrozen_step_ms: float) -> float:
        """Return the longest time that a step may take, in ms; 0 without ``target_speedup``."""
        return unfrozen_step_ms / self.target_speedup if self.target_speedup else 0.0

    @classmethod
    def parse(cls, section: Mapping[str, Any] | TimelyFreezeConfig | None) -> TimelyFreezeConfig:
        """Read a JSON section; None is all defaults. Raises ConfigError."""
        if isinstance(section, cls):
            return section
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            shown = textwrap.shorten(repr(section), 72)
            raise ConfigError(f'"{SECTION}" is {shown}: it must be an object of settings')
        if SECTION in section:
            raise ConfigError(f'the settings are a whole config: pass only its section "{SECTION}"')
        return cls(**{str(key): value for key, value in section.items()})


def _without_retired(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the retired ones. A line of the log names each of those.

    Raises ConfigError for one of ``REMOVED``.
    """
    for name, advice in REMOVED.items():
        if name in settings:
            raise ConfigError(f"{SECTION}.{name} is retired: {advice}")
    kept = {name: value for name, value in settings.items() if name not in RETIRED}
    for name in settings.keys() & RETIRED.keys():
        _say_retired(name)
    if settings.get("monitoring_masks") in (False, "false"):
        kept["max_freeze_ratio"] = 0.0  # the run was to freeze nothing
    return kept


@functools.cache
def _say_retired(name: str) -> None:
    """Log it once in a process, and on one rank only. Settings are read several times, on all ranks."""
    rank = int(os.environ.get("RANK", "0"))
    announce(rank, f"{SECTION}.{name} is no setting any more and is ignored: {RETIRED[name]}", logging.WARNING)


def read_setting(field: str, value: Any) -> Any:
    """Return one setting's value, checked without the other settings. Raises pydantic's ValidationError."""
    definition = TimelyFreezeConfig.model_fields[field]
    kind: Any = Annotated[definition.annotation, definition]
    return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)


def allowed(field: str) -> str:
    """Describe a setting's allowed values from the type and the limits of its field."""
    schema = _schemas()[field]
    *first, last = [words for choice in schema.get("anyOf", [schema]) for words in in_words(choice)]
    return f"{', '.join(first)}{',' if last == 'null' else ''} or {last}" if first else last


@functools.cache
def _schemas() -> Any:
    return TimelyFreezeConfig.model_json_schema()["properties"]


def find_section(host_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``timely_freeze`` section of a host's JSON config, or None.

    Raises ConfigError for a key that is almost the section's name: hosts ignore unknown keys without a word.
    """
    for key in host_config:
        squeezed = re.sub(r"[^a-z]", "", str(key).lower())
        alike = difflib.SequenceMatcher(None, squeezed, SECTION.replace("_", "")).ratio()
        if key != SECTION and alike >= 0.85:
            raise ConfigError(f'unknown section {quoted(key)} in the config: did you mean "{SECTION}"?')
    return host_config.get(SECTION)


def _describe(error: ValidationError) -> list[str]:
    lines: dict[str, str] = {}
    for item in error.errors():
        field = str(item["loc"][0])
        name = _limit_of(item["loc"][1]) if field == "freeze_limits" and item["loc"][1:] else f"{SECTION}.{field}"
        lines.setdefault(field, f"{name} is {item['input']!r}: allowed is {allowed(field)}")
    return list(lines.values())


def _limit_of(pattern: object) -> str:
    return f"{SECTION}.freeze_limits[{quoted(pattern)}]"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
