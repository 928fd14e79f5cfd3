"""Files of the repository that benchmarks use: results, pages with tables, and the examples' modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def result_file(name: str) -> Path:
    """Return the path of a committed result, such as ``hosts/speed.json``."""
    return ROOT / "benchmarks" / "results" / name


def write_json(path: Path, value: Any) -> None:
    """Write a result as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def read_part(path: Path, name: str) -> dict[str, Any]:
    """Return one object of a result file; it is empty if the file does not exist."""
    found: dict[str, Any] = json.loads(path.read_text())[name] if path.exists() else {}
    return found


def keep_row(path: Path, part: str, rows: Mapping[str, Any], order: Iterable[str], **record: Any) -> None:
    """Replace some rows of one object in a result file; all its rows are written in the given order."""
    found = {**read_part(path, part), **rows}
    write_json(path, {**record, part: {name: found[name] for name in order if name in found}})


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


def put_table(page: Path, name: str, table: str) -> None:
    """Write a table into a Markdown page, between the lines ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``."""
    before, rest = page.read_text().split(f"<!-- {name}: ")
    command, old = rest.split("-->\n", 1)
    after = old.split(f"<!-- end of {name} -->")[1]
    page.write_text(f"{before}<!-- {name}: {command}-->\n{table}\n<!-- end of {name} -->{after}")


def use_example(*folders: str) -> None:
    """Make modules of ``examples/`` and of some of its folders importable, as the examples import each other."""
    paths = [str(ROOT / "examples" / folder) for folder in ("", *folders)]
    sys.path[:0] = [path for path in paths if path not in sys.path]
