"""Batches as a Chrome trace: open the file in Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Each panel is a process, each rank of it a thread, each action a slice ("ph": "X"); times are microseconds, as the
format wants. The critical path is a thread of its own below the ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tf_adapters.report.colours import NAMES
from tf_adapters.report.gantt_marks import rank_label
from tf_adapters.report.layout import Block, Panel

Event = dict[str, Any]


def write_trace(panels: Sequence[Panel], path: str | os.PathLike[str]) -> None:
    """Write the panels, all from time 0, as a trace. Raises OSError where ``path`` cannot be written."""
    data = {"traceEvents": list(trace_events(panels)), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")


def trace_events(panels: Sequence[Panel]) -> Iterator[Event]:
    """The events of all panels; process ids are 1, 2, ..., thread ids the rank plus 1."""
    for process, panel in enumerate(panels, start=1):
        yield _name("process_name", process, 0, name=panel.title)
        yield _name("process_sort_index", process, 0, sort_index=process)
        for rank, stages in enumerate(panel.stages):
            yield from _thread(process, rank + 1, rank_label(stages, rank, most=len(stages)), panel.rows[rank])
        by_action = {block.action: block for block in panel.blocks if block.step == 0}
        path = [by_action[action] for action in panel.critical_path]
        yield from _thread(process, len(panel.stages) + 1, "critical path", path)


def _thread(process: int, thread: int, name: str, blocks: Sequence[Block]) -> Iterator[Event]:
    yield _name("thread_name", process, thread, name=name)
    yield _name("thread_sort_index", process, thread, sort_index=thread)
    for block in blocks:
        yield {
            "name": str(block.action),
            "cat": NAMES[block.action.kind].replace(",", ""),  # commas separate categories
            "ph": "X",
            "ts": block.start_ms * 1e3,
            "dur": (block.end_ms - block.start_ms) * 1e3,
            "pid": process,
            "tid": thread,
            "args": {
                "stage": block.action.stage,
                "microbatch": block.action.microbatch,
                **({"freeze ratio": block.frozen} if block.frozen else {}),
                "on the critical path": block.critical,
            },
        }


def _name(event: str, process: int, thread: int, **args: Any) -> Event:
    return {"name": event, "ph": "M", "pid": process, "tid": thread, "args": args}
