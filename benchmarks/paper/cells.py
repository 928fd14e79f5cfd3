"""The cells of the paper's tables: what is trained where, and the paper's figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.paper.models import MODELS, PARTITIONS, Model

HOSTS = {"torch": "torch.distributed.pipelining", "deepspeed": "DeepSpeed", "megatron-core": "Megatron-Core"}
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zbv": "ZBV"}
OF_HOST = {
    "torch": tuple(SCHEDULES),
    "deepspeed": ("gpipe", "1f1b"),
    "megatron-core": ("1f1b", "interleaved"),
}
TWO_STAGES = ("interleaved", "zbv")  # of each rank
MICROBATCHES = 8

PAPER = {  # throughput in tokens/s, or training time in s (ConvNeXt, ViT): without freezing and with; freeze ratio in %
    ("1B", "gpipe", ""): (6965, 8821, 19.97),
    ("1B", "1f1b", ""): (7152, 9257, 15.53),
    ("1B", "interleaved", ""): (6800, 8355, 37.89),
    ("1B", "zbv", ""): (7541, 9426, 39.65),
    ("8B", "gpipe", ""): (5737, 7821, 35.64),
    ("8B", "1f1b", ""): (5748, 7867, 33.14),
    ("8B", "interleaved", ""): (6173, 8081, 60.07),
    ("8B", "zbv", ""): (6889, 8939, 69.92),
    ("13B", "gpipe", ""): (3550, 5132, 72.18),
    ("13B", "1f1b", ""): (3917, 5590, 69.33),
    ("13B", "interleaved", ""): (4271, 5775, 72.22),
    ("13B", "zbv", ""): (4660, 5809, 63.42),
    ("ViT", "gpipe", ""): (14339, 11195, 50.00),
    ("ViT", "1f1b", ""): (13374, 10266, 43.39),
    ("ConvNeXt", "gpipe", "memory"): (10507, 8985, 44.27),
    ("ConvNeXt", "1f1b", "memory"): (25212, 21687, 29.12),
    ("ConvNeXt", "gpipe", "parameter"): (15144, 11378, 21.17),
    ("ConvNeXt", "1f1b", "parameter"): (31935, 24741, 31.26),
    ("ConvNeXt", "gpipe", "time"): (10476, 8430, 44.00),
    ("ConvNeXt", "1f1b", "time"): (22820, 18671, 46.01),
}
PAPER_RANKS = {"ViT": 8}  # the others: 4


@dataclass(frozen=True)
class Cell:
    """One training: a model cut into stages, on a host's engine."""

    host: str
    model: str
    schedule: str
    ranks: int
    partition: str = ""
    method: str = "timely"

    def __str__(self) -> str:
        more = [self.partition, self.method if self.method != "timely" else ""]
        return " ".join([self.host, self.model, self.schedule, str(self.ranks), *(word for word in more if word)])

    @property
    def of(self) -> Model:
        return MODELS[self.model]

    @property
    def stages(self) -> int:
        return self.ranks * (2 if self.schedule in TWO_STAGES else 1)

    @property
    def microbatches(self) -> int:
        """The paper's: 8, and 6 on 6 ranks."""
        return 6 if self.ranks == 6 else MICROBATCHES

    @property
    def boundaries(self) -> list[int]:
        """Where the model's stages begin, and the number of its layers."""
        held = [self.microbatches if self.schedule == "gpipe" else self.stages - s for s in range(self.stages)]
        return self.of.boundaries(self.stages, self.partition, held)

    @property
    def stages_of_rank(self) -> list[tuple[int, ...]]:
        """By rank, its stages: looped, or for ZBV in a V."""
        if self.schedule not in TWO_STAGES:
            return [(rank,) for rank in range(self.ranks)]
        second = (lambda r: self.stages - 1 - r) if self.schedule == "zbv" else (lambda r: r + self.ranks)
        return [(rank, second(rank)) for rank in range(self.ranks)]

    @property
    def paper(self) -> tuple[float, float] | None:
        """The paper's gain in throughput and freeze ratio over the run, both in %."""
        found = PAPER.get((self.model, self.schedule, self.partition))
        if found is None or self.ranks != PAPER_RANKS.get(self.model, 4) or self.method != "timely":
            return None
        unfrozen, timely, ratio = found
        is_time = self.model in ("ViT", "ConvNeXt")
        return 100.0 * (unfrozen / timely if is_time else timely / unfrozen) - 100.0, ratio


def all_cells() -> list[Cell]:
    """The table's rows in their order."""
    return list(_cells())


def _cells() -> Iterator[Cell]:
    for host, schedules in OF_HOST.items():
        for model in ("1B", "8B", "13B"):
            for schedule in schedules:
                yield Cell(host, model, schedule, 4)
        for ranks in (6, 8):
            for schedule in schedules:
                yield Cell(host, "8B", schedule, ranks)
    for schedule in ("gpipe", "1f1b"):
        for host in ("torch", "deepspeed"):
            yield Cell(host, "ViT", schedule, 8)
        for partition in PARTITIONS:
            yield Cell("torch", "ConvNeXt", schedule, 4, partition)
    for method in ("timely+apf", "timely+autofreeze"):
        yield Cell("torch", "8B", "1f1b", 4, method=method)
