"""Each warning and error that the source can print has an entry in docs/troubleshooting.md, by pattern."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    path
    for folder in ("tf_adapters", "megatron_patches")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "testing" not in path.parts
]
PATTERNS = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
SPEAKING = {"announce", "warn", "_warn", "refuse", "_fail", "_refuse", "_leave_to_host"}
NOT_OURS = {"AttributeError", "KeyError", "ArgumentTypeError"}
"""Of a wrong name in Python, and what argparse and callers turn into a line of their own."""
ANY = "…"


def text_of(node: ast.expr) -> str | None:
    """A message as written, ``…`` for what is filled in; None where nothing of it is literal."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else ANY for part in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or ANY) + (text_of(node.right) or ANY)
    return None


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, message) of every error, warning and refusal that a file writes down itself."""
    refusals = path.name == "support.py"
    speaking = SPEAKING | ({"append"} if path.name == "tap_findings.py" else set())  # to the lines that are logged
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in speaking or (name.endswith("Error") and name not in NOT_OURS):
                prefix = "timely_freeze cannot run here: " if name == "refuse" else ""
                texts = [text for text in map(text_of, node.args) if text and re.search(r"\w", text)]
                yield from ((node.lineno, prefix + text) for text in texts)
        elif refusals and isinstance(node, ast.Return) and node.value is not None:
            text = text_of(node.value)
            if text and " " in text:
                yield node.lineno, f"timely_freeze cannot run here: {text}"


MESSAGES = [(path.relative_to(ROOT), line, text) for path in FILES for line, text in messages(path)]


def matches(pattern: str, message: str) -> bool:
    """Whether a pattern describes the message; ``…`` stands for anything. A message may go on after it."""
    expression = ".*".join(map(re.escape, pattern.removesuffix(ANY).split(ANY)))
    return re.match(expression, message, re.DOTALL) is not None


def test_there_are_messages_to_look_for() -> None:
    assert len(MESSAGES) > 100
    assert any(text.startswith("the report could not be written") for *_, text in MESSAGES)


@pytest.mark.parametrize("room", sorted({path.parts[1] for path, *_ in MESSAGES}))
def test_every_message_has_an_entry(room: str) -> None:
    missing = [
        f"{path}:{line}: {text}"
        for path, line, text in MESSAGES
        if path.parts[1] == room and not any(matches(pattern, text) for pattern in PATTERNS)
    ]
    assert not missing, "add to docs/troubleshooting.md:\n" + "\n".join(missing)


def test_no_entry_is_about_a_message_that_is_gone() -> None:
    gone = [pattern for pattern in PATTERNS if not any(matches(pattern, text) for *_, text in MESSAGES)]
    assert not gone, gone


def test_no_pattern_covers_everything() -> None:
    covered = {pattern: sum(matches(pattern, text) for *_, text in MESSAGES) for pattern in PATTERNS}
    assert max(covered.values()) < len(MESSAGES) / 3, covered
