"""``tf-adapters check``: what the settings in a DeepSpeed config mean, before a job waits in a queue."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tf_adapters.cli.plan import load_json
from tf_adapters.config import SECTION, TimelyFreezeConfig, find_section
from tf_adapters.errors import ConfigError
from tf_adapters.goals import GOALS

if TYPE_CHECKING:
    from tf_adapters.training.state import RunState

_DESCRIPTION = """\
Say what the "timely_freeze" section of a DeepSpeed config means: the goal, what stays exact, what happens in which
step, where the report goes, and each setting that differs from its default.
FILE is a DeepSpeed config in JSON, or the section alone; "-" reads standard input.
The model and the number of ranks are not known here: the job itself checks them when it starts.
Exit status: 0, or 2 with the line with which the job would stop."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="say what the settings in a DeepSpeed config mean, before the job starts",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="FILE", help="a DeepSpeed config, or its section alone; - for standard input")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = _read(args.config)
    section = find_section(config)
    if section is None:
        print(f'off: the config has no "{SECTION}" section')
        return 0
    settings = TimelyFreezeConfig.parse(section)
    print("\n".join(_meaning(settings, config)) if settings.enabled else 'off: "enabled" is false')
    return 0


def _read(path: str) -> Mapping[str, Any]:
    """Return a DeepSpeed config. A file with nothing but settings becomes one with this section."""
    config = load_json(path)
    if not isinstance(config, dict):
        raise ConfigError("this is not a DeepSpeed config: a config is a JSON object")
    is_section = SECTION not in config and not config.keys().isdisjoint(TimelyFreezeConfig.model_fields)
    return {SECTION: config} if is_section else config


def _meaning(settings: TimelyFreezeConfig, config: Mapping[str, Any]) -> Iterator[str]:
    # These import torch, which takes seconds.
    from tf_adapters.deepspeed.json_config import config_problem, config_warnings
    from tf_adapters.hosts.support import refuse
    from tf_adapters.training.log_lines import meaning

    refuse(config_problem(config))
    goal = f"goal {settings.goal}" if settings.goal else "without a goal"
    yield f"on: {goal} ({meaning(settings) if settings.plans else 'freezes stable parameters, without a plan'})"
    yield from _phases(settings, config)
    yield _placement(settings)
    yield f"report: {settings.report_path}"
    yield from _differing(settings)
    yield from (f"warning: {text}" for text in config_warnings(config))


def _phases(settings: TimelyFreezeConfig, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each phase: its steps, and what the run does in them."""
    from tf_adapters.deepspeed.json_config import scheduler_warmup
    from tf_adapters.training.phases import DEFAULT_WARMUP_STEPS
    from tf_adapters.training.state import RunState

    of_scheduler = scheduler_warmup(config)
    state = RunState.fresh(settings, DEFAULT_WARMUP_STEPS if of_scheduler is None else of_scheduler)
    phases = state.phases
    starts: dict[str, int] = {}  # first step by what happens; two phases may look alike
    for end in (0, phases.warmup_end, phases.upper_end, phases.monitoring_end, phases.progressive_end):
        starts.setdefault(_what_happens(settings, state, end + 1), end + 1)
    lasts = [first - 1 for first in [*starts.values()][1:]]
    for (text, first), last in zip(starts.items(), [*lasts, None], strict=True):
        yield f"from step {first}: {text}" if last is None else f"steps {first} to {last}: {text}"
    if settings.warmup_steps == "auto" and of_scheduler is None:
        yield "the config names no warm-up of a scheduler: one that the script makes may change these steps"
    if phases.mixed:
        yield "monitoring may end earlier, once its times are precise; later phases then begin earlier"


def _what_happens(settings: TimelyFreezeConfig, state: RunState, step: int) -> str:
    from tf_adapters.training.log_lines import phase

    is_planned = settings.plans and settings.method != "none" and step > state.phases.freezing_start
    if is_planned and not settings.max_freeze_ratio:
        return "weight gradients deferred as planned, none skipped" if settings.defers else "planned, nothing frozen"
    return phase(settings, state, step)


def _placement(settings: TimelyFreezeConfig) -> str:
    stages = "two stages on each rank, in a V" if settings.placement == "v" else "stages where DeepSpeed puts them"
    order = "DeepSpeed's own" if settings.schedule == "host" else settings.schedule
    return f"placement: {stages}; schedule: {order}{', then the order of the plan' if settings.defers else ''}"


def _differing(settings: TimelyFreezeConfig) -> Iterator[str]:
    """Yield a line for each setting that differs from its default, or that the goal has chosen."""
    chosen = GOALS.get(settings.goal or "", {})
    for name, value in settings:
        default = TimelyFreezeConfig.model_fields[name].default
        if name in chosen and value == chosen[name]:
            yield f"{name}: {json.dumps(value)} (chosen by the goal)"
        elif name != "goal" and (value != default or name in chosen):
            by_goal = json.dumps(chosen.get(name, default))
            yield f"{name}: {json.dumps(value)} ({'the goal would choose' if name in chosen else 'default'} {by_goal})"
