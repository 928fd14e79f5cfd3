"""Acceptance on GPUs, part by part: what tests on CPUs cannot show. What matters most comes first.

Each part has a time limit, and each check is written as soon as it has run. If a part fails or runs out of time, its
checks stay, and the next part runs. A part that lacks something is skipped, with the reason. A part that has a result
is skipped, too, unless --again is given. --minutes is the time limit for all parts together. ``--device cpu --tiny``
runs the parts without a GPU, to test the script: times and memory are then shown and not judged. Exits with 1 if a
check failed.

Writes results/gpu/acceptance.json, part by part, and the table into docs/gpu.md.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import pipeline_on_one_gpu
from benchmarks.gpu.parts import NOT_RUN, Options, Part, Skipped, join
from benchmarks.gpu.quarters import mps
from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import machine
from tf_adapters.testing import RankPool

MODULES = {
    "probe": "probe",
    "pipeline-one-gpu": "pipeline_on_one_gpu",
    "hot-path": "hot_path",
    "memory": "memory",
    "backward-time": "backward_time",
    "oracle": "oracle",
    "same-bits": "same_bits",
    "recompilations": "recompilations",
    "optimizer-step": "optimizer_step",
    "several-gpus": "several_gpus",
}
"""The module of each part, which has a ``PART``, by the part's name. The most valuable part comes first."""
LEAST_S = 20.0
"""Seconds that must be left for a part to start."""
HEADINGS = ("part", "on a GPU", "on a CPU, tiny sizes")
Results = dict[str, dict[str, Any]]
"""Records by place ("cuda", "cuda, tiny", "cpu, tiny", ...), then by part."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--part", nargs="+", choices=MODULES, default=list(MODULES), help="by default all")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--again", action="store_true", help="repeat parts that have a result")
    parser.add_argument("--results", type=Path, default=result_file("gpu/acceptance.json"))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all parts together")
    args = parser.parse_args(arguments)
    end = time.monotonic() + 60 * args.minutes
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
        record = run_part(part_of(name), options, end - time.monotonic())
        print(described(name, record), flush=True)
        outcomes.append(record)
        if old is None or record["status"] != "skipped":  # a machine without a GPU takes no result away
            results.setdefault(where, {})[name] = record
            write_json(args.results, results)
            put_table(args.page, "gpu", table(results))
            put_table(args.page, "one-gpu", one_gpu_table(results))
    return int(any(record["status"] == "failed" for record in outcomes))


def place(options: Options) -> str:
    return options.device + (", tiny" if options.tiny else "")


def read(path: Path) -> Results:
    return json.loads(path.read_text()) if path.exists() else {}


def part_of(name: str) -> Part:
    part: Part = import_module(f"benchmarks.gpu.{MODULES[name]}").PART
    return part


def run_part(part: Part, options: Options, left_s: float = math.inf) -> dict[str, Any]:
    """Return the part's record: its status, and its checks or the reason. ``left_s`` seconds are left for all."""
    reason = part.missing(options)
    if reason is None and left_s < LEAST_S:
        reason = "no time is left"
    if reason is not None:
        return {"status": "skipped", "reason": reason}
    os.environ["DS_ACCELERATOR"] = options.device  # the ranks inherit it
    begin = time.monotonic()
    written = Path(tempfile.mkdtemp(prefix="gpu-checks-")) / "checks.jsonl"
    failure: str | None = None
    try:
        with beside(part, options) as shared, pool(part, shared) as ranks:
            skipped = ranks.run(on_rank, part.run, shared, written, timeout_s=min(60 * part.minutes, left_s))[0]
            if skipped is not None:
                return {"status": "skipped", "reason": skipped}
    except Exception as error:  # the next part still runs
        failure = f"{type(error).__name__}: {error}"
    checks = read_checks(written)
    failed = failure is not None or any(check["passed"] is False for check in checks.values())
    record: dict[str, Any] = {"status": "failed" if failed else "passed", "on": device(options)}
    if failure is not None:
        record["reason"] = failure
    if checks:
        record["checks"] = list(checks.values())
    return {**record, "seconds": round(time.monotonic() - begin, 1)}


def beside(part: Part, options: Options) -> AbstractContextManager[Options]:
    """Return a context that yields the ranks' options. It runs MPS if the part's ranks share one GPU."""
    return with_mps(options) if part.shares and options.cuda else nullcontext(options)


@contextmanager
def with_mps(options: Options) -> Iterator[Options]:
    """Run MPS inside the block."""
    with mps() as reason:
        yield replace(options, no_mps=reason)


def pool(part: Part, options: Options) -> RankPool:
    return RankPool(part.ranks(options), partial(join, options, part.backend))


def on_rank(run: Any, options: Options, written: Path) -> str | None:
    """Write each check as it comes, on rank 0. Return the reason why the part was skipped, if it was."""
    try:
        for check in run(options):
            if dist.get_rank() == 0:
                with written.open("a") as lines:
                    lines.write(json.dumps(asdict(check) | {"passed": check.passed}) + "\n")
    except Skipped as reason:
        return str(reason)
    return None


def read_checks(written: Path) -> dict[str, dict[str, Any]]:
    """Return the checks by name. A figure that was measured again replaces the earlier one."""
    lines = written.read_text().splitlines() if written.exists() else []
    checks = (json.loads(line) for line in lines)
    return {check["name"]: check for check in checks}


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
    """Return one row for each part, with its result on a GPU at full size and on a CPU."""
    lines = []
    for name in MODULES:
        records = (results.get(where, {}).get(name) for where in ("cuda", "cpu, tiny"))
        lines.append([f"`{name}`", *map(cell, records)])
    return markdown_table(HEADINGS, lines)


def one_gpu_table(results: Results) -> str:
    """Return the table of the pipeline on one GPU; without a GPU's result, the one of the rehearsal on a CPU."""
    for where in ("cuda", "cpu, tiny"):
        record = results.get(where, {}).get("pipeline-one-gpu", {})
        rows = pipeline_on_one_gpu.table(record.get("checks", []))
        if rows:
            place = record["on"].get("gpu", f"a CPU, tiny sizes, {record['on']['cores']} core(s): a rehearsal")
            return f"On {place}.\n\n" + markdown_table(pipeline_on_one_gpu.HEADINGS, rows)
    return "Not run."


def cell(record: dict[str, Any] | None) -> str:
    """Return a record as one line. A longer reason is in the JSON."""
    if record is None:
        return "not run"
    if "checks" not in record or "reason" in record:
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
