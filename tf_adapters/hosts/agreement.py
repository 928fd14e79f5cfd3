"""Make all ranks agree, before training, on the settings and on the freezable units of each stage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tf_adapters.collectives import Collectives, decide_from_all, on_all_ranks, on_one_rank
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import REFUSED, ConfigError, UnsupportedError
from tf_adapters.goals import GOALS
from tf_adapters.log import announce
from tf_adapters.report.build import disabled_report
from tf_adapters.selection.freeze_units import FreezeUnit
from tf_adapters.training.pipeline import HostInfo

T = TypeVar("T")
GivenConfig = TimelyFreezeConfig | Mapping[str, Any] | None


def same_on_all_ranks(
    collectives: Collectives, name: str, read: Callable[[], T], shown: Callable[[T], object] = repr
) -> T:
    """Return the value that ``read`` returns on every rank. Called on all ranks.

    An error of ``read`` on one rank is raised on all ranks. If values differ, raises ConfigError with the values as
    ``shown`` formats them.
    """
    values = on_all_ranks(collectives, read)
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"the {name} differ between ranks: rank 0 has {shown(values[0])}, rank {rank} has {shown(value)}; "
                "every rank needs the same"
            )
    return values[0]


def refuse_other_schedules(settings: TimelyFreezeConfig, why: str) -> None:
    """Raise ConfigError if the settings choose a schedule; ``why`` says what the host runs instead."""
    if settings.schedule != "host":
        raise ConfigError(f'timely_freeze.schedule is "{settings.schedule}": allowed is "host"; {why}')


def refuse_v(settings: TimelyFreezeConfig, advice: str) -> None:
    """Raise ConfigError if the settings ask for chunks in a V, which this host does not have from us."""
    if settings.placement == "v":
        raise ConfigError(f'timely_freeze.placement is "v": allowed is "host" here; {advice}')


def agree_on_settings(
    collectives: Collectives,
    host: HostInfo,
    read: Callable[[], TimelyFreezeConfig | None],
    check: Callable[[TimelyFreezeConfig], None],
) -> TimelyFreezeConfig | None:
    """Return the settings that every rank read. Return None and log the reason if freezing is not wanted.

    ``check`` raises UnsupportedError if the host cannot run the given settings. If the goal allows other settings, the
    nearest ones that every rank can run are returned. Called on all ranks. An error of ``read`` and of ``check`` is
    raised on all ranks, and so is ConfigError if the settings differ or rank 0 cannot write the report. If ``enabled``
    is false, a report says so.
    """
    settings = same_on_all_ranks(collectives, "timely_freeze settings", read, shown=_shown)
    if settings is None:
        announce(collectives.rank, f'disabled: the config has no "{SECTION}" section')
        return None
    on_one_rank(collectives, lambda: _check_output(settings))
    if settings.enabled:
        return _nearest(collectives, settings, check)
    reason = '"enabled" is false'
    on_one_rank(collectives, lambda: disabled_report(host, settings, reason).write(settings.report_path))
    announce(collectives.rank, f"disabled: {reason}")
    return None


def _nearest(
    collectives: Collectives, settings: TimelyFreezeConfig, check: Callable[[TimelyFreezeConfig], None]
) -> TimelyFreezeConfig:
    """Return the settings, or those nearest to their goal that every rank can run. Called on all ranks."""
    reason: UnsupportedError | None = None
    for nearest in settings.fallbacks():
        try:
            on_all_ranks(collectives, lambda candidate=nearest: check(candidate))  # type: ignore[misc]
        except UnsupportedError as error:
            reason = reason or error
            continue
        if reason is not None:
            _say_nearest(collectives.rank, settings, nearest, reason)
        return nearest
    assert reason is not None
    raise reason


def _say_nearest(rank: int, asked: TimelyFreezeConfig, nearest: TimelyFreezeConfig, reason: object) -> None:
    """Log which settings replace those of the goal, and why."""
    changes = " and ".join(f'{name} "{value}"' for name, value in nearest if value != getattr(asked, name))
    first = str(reason).replace(REFUSED, "").split("; rank ")[0]  # the reason of the first rank
    announce(rank, f"goal {asked.goal} takes {changes} here: {first}")


def _check_output(settings: TimelyFreezeConfig) -> None:
    """Raise ConfigError, before training starts, if no report can be written."""
    folder = settings.report_path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{SECTION}.output_dir is {settings.output_dir!r}: the report cannot be written to {folder} "
            f"({error.strerror or error}); allowed is a folder that rank 0 can write to"
        ) from None


def gather_units(
    collectives: Collectives, local: Callable[[], Mapping[int, tuple[FreezeUnit, ...]]]
) -> dict[int, tuple[FreezeUnit, ...]]:
    """Gather the units of every stage from all ranks. Called on all ranks.

    An error of ``local`` on one rank is raised on all ranks. Raises UnsupportedError if replicas of a stage have
    different units.
    """

    def merge(ranks: Sequence[Mapping[int, tuple[FreezeUnit, ...]]]) -> dict[int, tuple[FreezeUnit, ...]]:
        everywhere: dict[int, tuple[FreezeUnit, ...]] = {}
        for of_rank in ranks:
            for stage, units in of_rank.items():
                if everywhere.setdefault(stage, units) != units:
                    raise UnsupportedError(
                        f"timely_freeze cannot run here: the replicas of stage {stage} train different parameters"
                    )
        return everywhere

    return decide_from_all(collectives, lambda: dict(local()), merge)


def _shown(settings: TimelyFreezeConfig | None) -> str:
    if settings is None:
        return "none"
    chosen = GOALS.get(settings.goal or "", {})
    given = settings.model_dump(exclude_defaults=True)
    return str({name: value for name, value in given.items() if chosen.get(name) != value})
