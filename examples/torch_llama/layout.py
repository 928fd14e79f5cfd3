"""Which stage holds which layers, and which rank holds which stages: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""Each schedule's class in torch.distributed.pipelining.schedules."""

SINGLE = ("gpipe", "1f1b")  # one stage per rank; the others have two, or more without a V
V_SHAPED = ("zbv", "dualpipev")
IN_ROUNDS = ("interleaved", "interleaved_zero_bubble")


@dataclass(frozen=True)
class Layout:
    """One pipeline. For 2 ranks and 6 layers: (the rank's stages, each with its layers)

    1f1b    rank 0: 0 (0-2)           rank 1: 1 (3-5)
    looped  rank 0: 0 (0-1), 2 (4)    rank 1: 1 (2-3), 3 (5)
    V       rank 0: 0 (0-1), 3 (5)    rank 1: 1 (2-3), 2 (4)
    """

    schedule: str
    ranks: int
    layers: int
    microbatches: int
    looped: int = 2
    """Stages of a rank, of schedules that have several and no V."""

    def __post_init__(self) -> None:
        """Raises ValueError, one line, where the schedule cannot run like this."""
        here = f"{self.schedule} on {self.ranks} ranks"
        if self.layers < self.stages:
            raise ValueError(f"layers is {self.layers}: {here} has {self.stages} stages, each with a layer at least")
        at_least = self.stages if self.schedule in ("1f1b", "dualpipev") else 1
        if self.microbatches < at_least:
            raise ValueError(f"microbatches is {self.microbatches}: {here} needs at least {at_least}")
        rounds = max(1, self.microbatches // self.ranks) if self.schedule in IN_ROUNDS else 1
        if self.microbatches % rounds:
            raise ValueError(f"microbatches is {self.microbatches}: {here} makes {rounds} equal rounds of them")

    @property
    def stages(self) -> int:
        return self.ranks * (1 if self.schedule in SINGLE else 2 if self.schedule in V_SHAPED else self.looped)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        if self.schedule in SINGLE:
            return (rank,)
        if self.schedule in V_SHAPED:
            return (rank, self.stages - 1 - rank)
        return tuple(range(rank, self.stages, self.ranks))

    def layers_of(self, stage: int) -> range:
        """Equal shares; what remains makes the first stages one layer longer, as the last has the output layer."""
        share, longer = divmod(self.layers, self.stages)
        first = stage * share + min(stage, longer)
        return range(first, first + share + (stage < longer))
