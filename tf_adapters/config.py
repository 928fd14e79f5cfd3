"""TimelyFreezeConfig: the one schema behind the JSON section, the arguments and the Python call.

A field ``x_y`` is ``"x_y"`` in a ``timely_freeze`` JSON section, ``x_y=`` in Python and ``--timely-freeze-x-y`` on a
command line (``tf_adapters.arguments``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tf_adapters.errors import ConfigError

SECTION = "timely_freeze"


class TimelyFreezeConfig(BaseModel):
    """Settings of one training run. Steps are optimizer steps, ratios are shares in [0, 1].

    The phases follow each other (paper section 3): ``warmup_steps`` (T_w), then ``monitoring_steps``
    (T_m - T_w), then ``progressive_steps`` (T_f - T_m), then stable freezing to the end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(True, description="false leaves the host exactly as it is")
    method: Literal["timely", "timely+apf", "timely+autofreeze", "apf", "autofreeze", "none"] = Field(
        "timely",
        description="timely: planned ratios, uniform selection; timely+apf, timely+autofreeze: planned ratios, what "
        "is stable is frozen first; apf, autofreeze: what is stable, without a plan; none: plan, freeze nothing",
    )
    max_freeze_ratio: float = Field(0.8, ge=0, le=1, description="r_max: the mean freeze ratio that no stage exceeds")
    target_speedup: Annotated[float, Field(ge=1)] | None = Field(
        None, description="freeze the least that makes a step this many times as fast; by default, as fast as can be"
    )
    target_step_time_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the same as milliseconds of a step"
    )
    freeze_exclude: list[str] = Field(
        [], description="patterns (*, ?, [abc]) of parameters' names: what they match is never frozen"
    )
    freeze_limits: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        {}, description="a max_freeze_ratio of their own for the parameters that a pattern matches"
    )
    granularity: Literal["tensor", "row"] = Field(
        "tensor",
        description="what is frozen as one: whole tensors, or also rows of linear and embedding layers, with which "
        "any freeze ratio is met",
    )
    warmup_steps: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        "auto", description='T_w; "auto" takes the learning-rate warm-up of the host\'s scheduler'
    )
    monitoring: Literal["mixed", "halves"] = Field(
        "mixed",
        description="mixed: every second step draws freeze ratios, and monitoring ends once it is precise; halves: the "
        "paper's, nothing frozen in the first half, everything in the second",
    )
    monitoring_steps: int = Field(40, ge=2, description="steps of monitoring; mixed monitoring may need fewer")
    monitoring_precision: float = Field(
        0.02, gt=0, le=1, description="standard error, as a share of the times, at which mixed monitoring ends"
    )
    monitoring_masks: bool = Field(
        True, description='method "none" only: whether monitoring freezes, to measure what freezing would save'
    )
    progressive_steps: int = Field(50, ge=0, description="steps over which the freeze ratios rise to the plan's")
    stability_check_interval: int = Field(
        50, ge=1, description="steps between the stability checks of APF and AutoFreeze"
    )
    apf_threshold: float = Field(0.01, ge=0, le=1, description="T_APF: a score below it is stable")
    apf_alpha: float = Field(0.99, ge=0, lt=1, description="alpha: weight of the past in APF's moving averages")
    apf_score: Literal["tensor", "elements"] = Field(
        "tensor", description="APF's score of a tensor: of its mean update, or of its elements' updates"
    )
    autofreeze_percentile: float = Field(
        80.0, ge=0, le=100, description="P_Auto: percentage of the layers that may count as stable"
    )
    seed: int = Field(0, ge=0, description="masks are a function of (seed, step, stage, microbatch)")
    schedule: Literal["host", "1f1b", "gpipe"] = Field(
        "host", description='the pipeline schedule to run; "host" keeps the one the host runs'
    )
    on_error: Literal["warn", "raise"] = Field(
        "warn", description="an error of ours: warn and train without freezing, or raise it on all ranks"
    )
    plan_wait: Literal["auto"] | bool = Field(
        "auto",
        description="whether training waits for the plan: true or false, or auto: only for one of about a second",
    )
    replan_threshold: float = Field(
        0.1, ge=0, description="how far times may leave the plan's, as a share of them, before it is made anew; 0: any"
    )
    replan_interval: int = Field(100, ge=1, description="steps of stable freezing between looks at them")
    solver_time_limit_s: float = Field(300.0, gt=0, description="seconds the planner may take")
    report_every: int = Field(100, ge=1, description="steps of stable freezing between updates of the report")
    output_dir: str = Field(".", description="the report is written to <output_dir>/timely_freeze/report.json")

    def __init__(self, **settings: Any) -> None:
        """Raises ConfigError, one line: each wrong setting, its value and what is allowed."""
        unknown = [_unknown_key(key) for key in settings if key not in type(self).model_fields]
        if unknown:
            raise ConfigError("; ".join(unknown))
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(_describe(error))) from None
        if self.target_speedup is not None and self.target_step_time_ms is not None:
            raise ConfigError(
                f"{SECTION}.target_speedup is {self.target_speedup} and {SECTION}.target_step_time_ms is "
                f"{self.target_step_time_ms}: allowed is one of the two"
            )
        for pattern, limit in self.freeze_limits.items():
            if self.plans and limit > self.max_freeze_ratio:
                raise ConfigError(
                    f"{_limit_of(pattern)} is {limit}: allowed is a number from 0 to {SECTION}.max_freeze_ratio, "
                    f"which is {self.max_freeze_ratio}"
                )

    @property
    def stability_metric(self) -> Literal["apf", "autofreeze"] | None:
        """What tells stable parameters from others; None where the method does not ask."""
        if self.method in ("apf", "timely+apf"):
            return "apf"
        return "autofreeze" if self.method in ("autofreeze", "timely+autofreeze") else None

    @property
    def plans(self) -> bool:
        """Whether the pipeline is monitored and planned for: APF and AutoFreeze alone do without."""
        return self.method not in ("apf", "autofreeze")

    @property
    def freeze_caps(self) -> dict[str, float]:
        """By pattern of ``freeze_limits``, how often its parameters are frozen where all others are: in [0, 1].

        A share of ``max_freeze_ratio`` where there is a plan, so that at a mean ratio of that the mean of what the
        pattern matches is its limit.
        """
        full = self.max_freeze_ratio if self.plans else 1.0
        return {pattern: limit / full if full else 0.0 for pattern, limit in self.freeze_limits.items()}

    @property
    def report_path(self) -> Path:
        """Where rank 0 leaves the report."""
        return Path(self.output_dir) / SECTION / "report.json"

    def target_ms(self, unfrozen_step_ms: float) -> float:
        """How long a step may take, in ms; 0 where it is to be as short as can be."""
        if self.target_speedup is not None:
            return unfrozen_step_ms / self.target_speedup
        return self.target_step_time_ms or 0.0

    @classmethod
    def parse(cls, section: Mapping[str, Any] | TimelyFreezeConfig | None) -> TimelyFreezeConfig:
        """Read a JSON section; None is all defaults. Raises ConfigError."""
        if isinstance(section, cls):
            return section
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{SECTION}" is {section!r}: it must be an object of settings')
        return cls(**{str(key): value for key, value in section.items()})


def allowed(field: str) -> str:
    """What a setting may be, in words."""
    return _ALLOWED[field]


def find_section(host_config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``timely_freeze`` section of a host's JSON config, or None.

    Raises ConfigError for a key that is almost the section's name: hosts ignore unknown keys, so a job
    would otherwise train without freezing and say nothing.
    """
    for key in host_config:
        if key != SECTION and _is_near_miss(key):
            raise ConfigError(f'unknown section "{key}" in the config: did you mean "{SECTION}"?')
    return host_config.get(SECTION)


def _is_near_miss(key: str) -> bool:
    squeezed = re.sub(r"[^a-z]", "", str(key).lower())
    return difflib.SequenceMatcher(None, squeezed, SECTION.replace("_", "")).ratio() >= 0.85


def _unknown_key(key: str) -> str:
    close = difflib.get_close_matches(str(key), TimelyFreezeConfig.model_fields, n=1, cutoff=0.6)
    hint = f'did you mean "{close[0]}"?' if close else f"allowed are {', '.join(TimelyFreezeConfig.model_fields)}"
    return f'{SECTION} has an unknown key "{key}": {hint}'


def _describe(error: ValidationError) -> list[str]:
    lines: dict[str, str] = {}
    for item in error.errors():
        field = str(item["loc"][0])
        name = _limit_of(item["loc"][1]) if field == "freeze_limits" and item["loc"][1:] else f"{SECTION}.{field}"
        lines.setdefault(field, f"{name} is {item['input']!r}: allowed is {allowed(field)}")
    return list(lines.values())


def _limit_of(pattern: object) -> str:
    return f'{SECTION}.freeze_limits["{pattern}"]'


_ALLOWED = {
    "enabled": "true or false",
    "method": '"timely", "timely+apf", "timely+autofreeze", "apf", "autofreeze" or "none"',
    "max_freeze_ratio": "a number from 0 to 1",
    "target_speedup": "a number of at least 1, or null",
    "target_step_time_ms": "a number above 0, or null",
    "freeze_exclude": 'a list of names with *, ? and [abc], such as ["*.bias", "embed*"]',
    "freeze_limits": 'an object of patterns and ratios from 0 to max_freeze_ratio, such as {"*embed*": 0.2}',
    "granularity": '"tensor" or "row"',
    "warmup_steps": '"auto" or an integer of at least 0',
    "monitoring": '"mixed" or "halves"',
    "monitoring_steps": "an integer of at least 2",
    "monitoring_precision": "a number above 0, up to 1",
    "monitoring_masks": "true or false",
    "progressive_steps": "an integer of at least 0",
    "stability_check_interval": "an integer of at least 1",
    "apf_threshold": "a number from 0 to 1",
    "apf_alpha": "a number from 0 to below 1",
    "apf_score": '"tensor" or "elements"',
    "autofreeze_percentile": "a number from 0 to 100",
    "seed": "an integer of at least 0",
    "schedule": '"host", "1f1b" or "gpipe"',
    "on_error": '"warn" or "raise"',
    "plan_wait": '"auto", true or false',
    "replan_threshold": "a number of at least 0",
    "replan_interval": "an integer of at least 1",
    "solver_time_limit_s": "a number above 0",
    "report_every": "an integer of at least 1",
    "output_dir": "a path",
}
