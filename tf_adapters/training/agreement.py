"""What all ranks must agree on before a host trains with freezing: the settings, and what each stage can freeze."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tf_adapters.collectives import Collectives, on_all_ranks
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError, UnsupportedError
from tf_adapters.log import announce
from tf_adapters.selection.units import FreezeUnit

UnitsByStage = dict[int, tuple[FreezeUnit, ...]]


def agree_on_settings(
    collectives: Collectives, read: Callable[[], TimelyFreezeConfig | None]
) -> TimelyFreezeConfig | None:
    """The settings that every rank read; None, with a line that says why, where freezing is not wanted.

    ``read`` also checks that the host can be frozen. Called on all ranks. Raises what it raises, or ConfigError if
    the ranks' settings differ, on all of them.
    """
    settings = _same_everywhere(on_all_ranks(collectives, read))
    if settings is not None and settings.enabled:
        return settings
    reason = 'the config has no "timely_freeze" section' if settings is None else '"enabled" is false'
    announce(collectives.rank, f"disabled: {reason}")
    return None


def gather_units(collectives: Collectives, local: Mapping[int, tuple[FreezeUnit, ...]]) -> UnitsByStage:
    """The units of every stage, from those of each rank's stages. Called on all ranks.

    Raises UnsupportedError on all of them if replicas of a stage would freeze different things.
    """
    everywhere: UnitsByStage = {}
    for of_rank in on_all_ranks(collectives, lambda: dict(local)):
        for stage, units in of_rank.items():
            if everywhere.setdefault(stage, units) != units:
                raise UnsupportedError(
                    f"timely_freeze cannot run here: the replicas of stage {stage} train different parameters"
                )
    return everywhere


def _same_everywhere(settings: list[TimelyFreezeConfig | None]) -> TimelyFreezeConfig | None:
    different = next((rank for rank, given in enumerate(settings) if given != settings[0]), None)
    if different is None:
        return settings[0]
    raise ConfigError(
        f"the timely_freeze settings differ between ranks: rank 0 has {_shown(settings[0])}, "
        f"rank {different} has {_shown(settings[different])}; every rank needs the same"
    )


def _shown(settings: TimelyFreezeConfig | None) -> str:
    return "none" if settings is None else str(settings.model_dump(exclude_defaults=True))
