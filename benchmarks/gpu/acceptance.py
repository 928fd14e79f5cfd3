"""Acceptance on GPUs, part by part: what tests on CPUs cannot show. At most ten minutes for each part.

A part that lacks something is skipped, with the reason; one that has its result is not run again without --again.
``--device cpu --tiny`` runs the parts where there is no GPU, to prove the script: figures of time and memory are then
shown and not judged. Exits with 1 if a check failed.

Writes results/gpu/acceptance.json, part by part, and the table into docs/gpu.md.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import NOT_RUN, Check, Options, Part, Skipped, join
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.testing import RankPool, RanksFailed

MODULES = {
    "oracle": "oracle",
    "same-bits": "same_bits",
    "hot-path": "hot_path",
    "backward-time": "backward_time",
    "recompilations": "recompilations",
    "memory": "memory",
    "two-processes": "two_processes",
    "optimizer-step": "optimizer_step",
    "several-gpus": "several",
}
"""By the name of each part its module, which has its ``PART``."""
LIMIT_S = 600.0
HEADINGS = ("part", "on a GPU", "on a CPU, tiny sizes")
Results = dict[str, dict[str, Any]]
"""By where it ran ("cuda", "cuda, tiny", "cpu, tiny", ...), then by part."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--part", nargs="+", choices=MODULES, default=list(MODULES), help="by default all")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--again", action="store_true", help="also what has its result")
    parser.add_argument("--results", type=Path, default=result_file("gpu/acceptance.json"))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md")
    args = parser.parse_args(arguments)
    options = Options(args.device, args.tiny)
    results = read(args.results)
    where = place(options)
    outcomes = []
    for name in args.part:
        old = results.get(where, {}).get(name)
        if old is not None and old["status"] in ("passed", "failed") and not args.again:
            print(f"{name}: has its result ({old['status']}); --again runs it again", flush=True)
            outcomes.append(old)
            continue
        record = run_part(part_of(name), options)
        print(described(name, record), flush=True)
        outcomes.append(record)
        if old is None or record["status"] != "skipped":  # a machine without a GPU takes no result away
            results.setdefault(where, {})[name] = record
            write_json(args.results, results)
            put_table(args.page, "gpu", table(results))
    return int(any(record["status"] == "failed" for record in outcomes))


def place(options: Options) -> str:
    return options.device + (", tiny" if options.tiny else "")


def read(path: Path) -> Results:
    return json.loads(path.read_text()) if path.exists() else {}


def part_of(name: str) -> Part:
    part: Part = import_module(f"benchmarks.gpu.{MODULES[name]}").PART
    return part


def run_part(part: Part, options: Options) -> dict[str, Any]:
    """The part's record: its status, and why, or its checks."""
    reason = part.missing(options)
    if reason is not None:
        return {"status": "skipped", "reason": reason}
    os.environ["DS_ACCELERATOR"] = options.device  # the ranks inherit it
    begin = time.monotonic()
    try:
        with RankPool(part.ranks(options), partial(join, options, part.backend)) as ranks:
            outcome = ranks.run(on_rank, part.run, options, timeout_s=LIMIT_S)[0]
    except RanksFailed as error:
        return {"status": "failed", "reason": str(error), "on": device(options)}
    if isinstance(outcome, str):
        return {"status": "skipped", "reason": outcome}
    failed = any(check.passed is False for check in outcome)
    return {
        "status": "failed" if failed else "passed",
        "on": device(options),
        "seconds": round(time.monotonic() - begin, 1),
        "checks": [asdict(check) | {"passed": check.passed} for check in outcome],
    }


def on_rank(run: Any, options: Options) -> list[Check] | str:
    """Return the checks of a rank, or the reason why the part was skipped."""
    try:
        return list(run(options))
    except Skipped as reason:
        return str(reason)


def device(options: Options) -> dict[str, Any]:
    """Return the device of a part, and the versions of its packages."""
    installed = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    wanted = ("transformer-engine", "megatron-core", "deepspeed")
    found = machine(*(name for name in wanted if name in installed))
    if options.cuda:
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        }
    return found


def described(name: str, record: dict[str, Any]) -> str:
    lines = [f"{name}: {record['status']}" + (f": {record['reason']}" if "reason" in record else "")]
    for check in record.get("checks", ()):
        verdict = {True: "ok  ", False: "FAIL", None: "    "}[check["passed"]]
        lines.append(f"  {verdict} {check['name']}: {figure(check)}{bounds(check)} {check['note']}".rstrip())
    return "\n".join(lines)


def figure(check: dict[str, Any]) -> str:
    value = check["value"]
    shown = f"{value:.0f}" if value == round(value) else f"{value:.3g}"
    return f"{shown}{'' if check['unit'].startswith('%') else ' '}{check['unit']}".rstrip()


def bounds(check: dict[str, Any]) -> str:
    """The limits of a figure, as text."""
    limits = [f"at {kind} {check[kind]:g}" for kind in ("most", "least") if check[kind] is not None]
    return f" ({', '.join(limits)})" if limits else ""


def table(results: Results) -> str:
    """Parts down; on a GPU at full size, and on a CPU."""
    lines = []
    for name in MODULES:
        records = (results.get(where, {}).get(name) for where in ("cuda", "cpu, tiny"))
        lines.append([f"`{name}`", *map(cell, records)])
    return markdown_table(HEADINGS, lines)


def cell(record: dict[str, Any] | None) -> str:
    """One record in a line; a long reason is in the JSON."""
    if record is None:
        return "not run"
    if "checks" not in record:
        reason = record["reason"].strip().splitlines()[-1]
        return f"{'not run' if record['status'] == 'skipped' else record['status']}: {reason}"
    judged = [check for check in record["checks"] if check["passed"] is not None]
    bad = [f"{check['name']} {figure(check)}" for check in judged if not check["passed"]]
    passed = f"{len(judged) - len(bad)} of {len(judged)} checks passed" if judged else "ran; no figure is judged"
    left_out = sum(check["name"].endswith(NOT_RUN) for check in record["checks"])
    more = [f"{left_out} cases not run"] if left_out else []
    return "; ".join([passed, *more, *bad]) + (f", on {record['on']['gpu']}" if "gpu" in record["on"] else "")


if __name__ == "__main__":
    sys.exit(main())
