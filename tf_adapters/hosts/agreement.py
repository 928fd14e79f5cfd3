"""Make all ranks agree, before training, on the settings and on the freezable units of each stage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tf_adapters.collectives import Collectives, decide_from_all, on_all_ranks, on_one_rank
from tf_adapters.config import SECTION, TimelyFreezeConfig
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.log import announce
from tf_adapters.report.build import disabled_report
from tf_adapters.selection.units import FreezeUnit
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


def refuse_post_validation(settings: TimelyFreezeConfig, host: str) -> None:
    """Raise ConfigError if updates are to be made before the norm of all gradients is known."""
    if settings.post_validates:
        raise ConfigError(
            f'timely_freeze.optimizer_step is "post_validated": allowed is "synchronous" with {host}, where updates '
            "cannot be made again"
        )


def agree_on_settings(
    collectives: Collectives, host: HostInfo, read: Callable[[], TimelyFreezeConfig | None]
) -> TimelyFreezeConfig | None:
    """Return the settings that every rank read. Return None and log the reason if freezing is not wanted.

    ``read`` also checks that the host can be frozen. Called on all ranks. An error of ``read`` is raised on all ranks,
    and so is ConfigError if the settings differ or rank 0 cannot write the report. If ``enabled`` is false, a report
    says so.
    """
    settings = same_on_all_ranks(collectives, "timely_freeze settings", read, shown=_shown)
    if settings is None:
        announce(collectives.rank, f'disabled: the config has no "{SECTION}" section')
        return None
    on_one_rank(collectives, lambda: _check_output(settings))
    if settings.enabled:
        return settings
    reason = '"enabled" is false'
    on_one_rank(collectives, lambda: disabled_report(host, settings, reason).write(settings.report_path))
    announce(collectives.rank, f"disabled: {reason}")
    return None


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
    return "none" if settings is None else str(settings.model_dump(exclude_defaults=True))
