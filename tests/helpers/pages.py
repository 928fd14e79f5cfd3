"""README, docs and the examples' READMEs: their fenced blocks, their commands, and the files that these read."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sample_reports import RANKS, report_data

import tf_adapters.cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    ROOT / "deepspeed_configs" / "paper" / "README.md",
    ROOT / "benchmarks" / "README.md",
]
TIMES = {action: [9.0, 9.0] if "F" in action else [9.0, 20.0] for rank in RANKS for action in rank}
PLAN_INPUT = {"ranks": RANKS, "times": TIMES, "max_freeze_ratio": 0.8}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if match[1] in languages:
                found.append(Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return found


class Command(NamedTuple):
    """One command of a ``sh`` block or of a line's own, without what it sets in the environment."""

    page: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {' '.join(self.words)}"


def commands() -> Iterator[Command]:
    for block in blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            yield from command(block.page, shlex.split(line, comments=True))
    for page in PAGES:
        for span in re.findall(
            r"(?<!`)`((?:python|make|tf-adapters|torchrun|deepspeed|pip) [^`]*)`(?!`)", page.read_text()
        ):
            yield from command(page, shlex.split(span))


def command(page: Path, words: list[str]) -> Iterator[Command]:
    while words and re.fullmatch(r"\w+=.*", words[0]):
        del words[0]
    if words:
        yield Command(page, tuple(itertools.takewhile(lambda word: word != ">", words)))


COMMANDS = list(dict.fromkeys(commands()))


def write_inputs() -> None:
    """Write the files that commands of the pages read into the working folder."""
    Path("input.json").write_text(json.dumps(PLAN_INPUT))
    Path("order.csv").write_text("\n".join(",".join(rank) for rank in RANKS))
    assert tf_adapters.cli.main(["plan", "input.json", "--out", "plan.json"]) == 0
    report = report_data(
        times=TIMES,
        plan=json.loads(Path("plan.json").read_text()),
        layers={
            stage: {
                "layers": [{"name": name, "forward_ms": 1.0, "backward_ms": 2.0, "parameters": 9} for name in "ab"],
                "rest_forward_ms": 0.0,
                "rest_backward_ms": 0.0,
            }
            for stage in "01"
        },
        measured={
            "backward_ms": [
                {"action": action, "afr": afr, "ms": 20.0 - 11 * afr, "phase": None}
                for action in ("0B0", "1B0")
                for afr in (0.0, 0.5, 1.0)
            ]
        },
    )
    for name in ("timely_freeze/report.json", "runs/timely_freeze/report.json", "REPORT.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps(report))
    Path("docs/images").mkdir(parents=True)
