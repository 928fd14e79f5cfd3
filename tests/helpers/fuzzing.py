"""Bad input by the thousand: settings, arguments, plan inputs, reports, simulate's inputs.

    python tests/helpers/fuzzing.py --cases 10000 --seed 0

A case starts from valid input and is damaged. It passes where the answer is success, or exit status 2 and one line (a
ConfigError of one line for settings in Python). A traceback, another status, a second line, a file outside the
case's own folder, or more than ``LIMIT_S`` seconds fail it; the seed and the number of the case make it again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import io
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tf_adapters.arguments import add_arguments, config_from_args
from tf_adapters.cli import main as command
from tf_adapters.config import TimelyFreezeConfig, find_section
from tf_adapters.errors import ConfigError

DATA = Path(__file__).resolve().parents[1] / "data"
LIMIT_S = 120.0
RANKS = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
TIMES = {action: [9.0, 9.0] if "F" in action else [9.0, 20.0] for rank in RANKS for action in rank}
PLAN_INPUT = {
    "ranks": RANKS,
    "times": TIMES,
    "communication": {"0F0->1F0": 0.4},
    "overhead": {"0B0": 0.1},
    "waits": {"1F0->0F1": 0.2},
    "max_freeze_ratio": 0.8,
}
CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
DEEP = "[" * 30_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 0.5, -0.0, 1.5, 1e-320, 1e308, -1e308, 10**400, 2**63, -(10**30)),
    *(float("nan"), float("inf"), "", " ", "0", "0.5", "nan", "inf", "true", "null", "\n", "a\nb", "\x00", "\ud800"),
    *("é", "‮", "x" * 5000, "0F0", "0B0", "9B9", "0W0", "-1F0", "0F0->1F0", "1F0->0F0", "٣F0", "../up", "/dev/null"),
    *([], {}, [[]], [None], {"": None}, [0, 1], [2, 1], ["0F0"], [["0F0", "0B0"]], {"0F0": [1, 1]}, [{}], {"a": {}}),
)
WORDS = (
    *("", "0", "1", "2", "4", "-1", "0.5", "1.5", "1e999", "nan", "1,2", ",", "x", "a\nb", "é", "\ud800", "1000000"),
    *(
        "9" * 400,
        "10" * 20,
        "٣",
        "gpipe",
        "1f1b",
        "zbv",
        "all",
        "interleaved,zbv",
        "llama-8b",
        "none",
        "--",
        "-",
        "=",
        "[]",
    ),
)
OPTIONS = {
    "plan": ("--out", "--defer", "--extra-microbatches", "--bogus"),
    "show": ("--png", "--svg", "--trace", "--no-gantt", "--plots", "--csv", "--bogus"),
    "simulate": (
        *(
            "--forward-ms",
            "--backward-ms",
            "--weight-share",
            "--model",
            "--sequences",
            "--length",
            "--tflops",
            "--sweep",
        ),
        *("--schedule", "--microbatches", "--stages", "--ranks", "--stages-per-rank", "--communication-ms", "--json"),
        *("--max-freeze-ratio", "--defer", "--extra-microbatches", "--input", "--csv", "--trace", "--no-gantt"),
    ),
    "configs": ("--copy", "--bogus"),
    "check": ("--bogus",),
}
DEEPSPEED_CONFIG = {
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
    "timely_freeze": {"goal": "paper", "freeze_limits": {"*norm*": 0.1}, "output_dir": "runs"},
}


class Failed(AssertionError):
    """A case that ended otherwise than it may."""


def report() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / "report_format_1.json").read_text())
    return loaded


# --- damage --------------------------------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything below ``value``."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from places(inner)


def damaged(value: Any, draw: random.Random) -> Any:
    """A copy of JSON values in which one to three things are replaced, removed, renamed, doubled or added."""
    whole = [copy.deepcopy(value)]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        container, key = draw.choice(list(places(whole)))
        match draw.randrange(6):
            case 0 if container is not whole:
                del container[key]
            case 1 if isinstance(container, dict):
                container[str(draw.choice(VALUES))] = container.pop(key)
            case 2 if isinstance(container, list) and container is not whole:
                container.append(copy.deepcopy(container[key]))
            case 3 if isinstance(container, dict):
                container[str(draw.choice(VALUES))] = draw.choice(VALUES)
            case 4 if isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
                with contextlib.suppress(OverflowError):  # an int of hundreds of digits is no float
                    container[key] = container[key] * draw.choice((-1, 0, 1e-9, 0.5, 3, 1e6, 1e300))
            case _:
                container[key] = copy.deepcopy(draw.choice(VALUES))
    return whole[0]


def as_bytes(value: Any, draw: random.Random) -> bytes:
    """The file of a damaged value; now and then the text itself is cut off, edited or not text at all."""
    text = json.dumps(damaged(value, draw) if draw.random() < 0.85 else value, ensure_ascii=draw.random() < 0.8)
    data = text.encode("utf-8", errors="surrogatepass")
    match draw.randrange(12):
        case 0:
            return data[: draw.randrange(len(data))]
        case 1:
            at = draw.randrange(len(data))
            return data[:at] + draw.randbytes(draw.randrange(1, 4)) + data[at + 1 :]
        case 2:
            return draw.choice((b"", b"\xff\xfe", b"null", b"[]", b'"x"', b"{}", b"1" * 5000, DEEP.encode(), b"{}{}"))
        case 3:
            return b"\xef\xbb\xbf" + data
    return data


# --- kinds of cases ------------------------------------------------------------------------------------------


def settings_case(draw: random.Random, folder: Path) -> None:
    fields = draw.sample(list(TimelyFreezeConfig.model_fields), 4)
    section: Any = {name: draw.choice([TimelyFreezeConfig.model_fields[name].default, *VALUES]) for name in fields}
    section = damaged(section, draw)
    one_line_or_nothing(lambda: TimelyFreezeConfig.parse(section))
    one_line_or_nothing(lambda: find_section({str(draw.choice(VALUES)): section, "timelyfreeze": 1}))


def one_line_or_nothing(act: Callable[[], object]) -> None:
    try:
        act()
    except ConfigError as error:
        if len(str(error).splitlines()) != 1:
            raise Failed(f"not one line: {error}") from None


def arguments_case(draw: random.Random, folder: Path) -> None:
    names = [f"--timely-freeze-{name.replace('_', '-')}" for name in TimelyFreezeConfig.model_fields]
    argv = ["--timely-freeze"] * draw.randrange(2)
    for name in draw.sample(names, draw.randrange(1, 4)):
        argv += [name] if draw.random() < 0.1 else [f"{name}={draw.choice(WORDS)}"]
    parser = add_arguments(argparse.ArgumentParser(prog="train.py"))

    def parse() -> int:
        with contextlib.suppress(ConfigError):  # a host's launcher prints it
            config_from_args(parser.parse_args(argv))
        return 0

    # The parser is the host's: what it refuses itself, an unknown argument say, comes with its usage.
    check(parse, last_line_only=True)


def plan_case(draw: random.Random, folder: Path) -> None:
    (folder / "in.json").write_bytes(as_bytes({**PLAN_INPUT, "defer": draw.random() < 0.2}, draw))
    run(["plan", "in.json", *options("plan", draw)])


def show_case(draw: random.Random, folder: Path) -> None:
    (folder / "in.json").write_bytes(as_bytes(report(), draw))
    run(["show", "in.json", *options("show", draw)])


def simulate_case(draw: random.Random, folder: Path) -> None:
    (folder / "in.json").write_bytes(as_bytes(draw.choice((report(), PLAN_INPUT)), draw))
    text = list(CSV)
    for _ in range(draw.randrange(3)):
        text[draw.randrange(len(text))] = draw.choice(("", ",", "\n", "9", "W", '"', "\x00", "é"))
    (folder / "order.csv").write_text("".join(text))
    argv = draw.choice(
        (
            ["in.json"],
            ["--input", "in.json"],
            ["--csv", "order.csv", "--forward-ms", "10", "--backward-ms", "20"],
            ["--schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--forward-ms", "1", "--backward-ms", "2"],
            [],
        )
    )
    run(["simulate", *argv, *options("simulate", draw)])


def configs_case(draw: random.Random, folder: Path) -> None:
    run(["configs", draw.choice((*WORDS, "plain", "../plain", "paper/llama_3_8b")), *options("configs", draw)])


def check_case(draw: random.Random, folder: Path) -> None:
    (folder / "in.json").write_bytes(as_bytes(DEEPSPEED_CONFIG, draw))
    run(["check", "in.json", *options("check", draw)])


def options(name: str, draw: random.Random) -> list[str]:
    """None to three options, with values that fit and values that do not. Pictures take long: few of them."""
    argv: list[str] = []
    for option in draw.sample(OPTIONS[name], min(draw.choice((0, 0, 1, 1, 2, 3)), len(OPTIONS[name]))):
        if option in ("--png", "--svg", "--plots") and draw.random() < 0.9:
            continue
        argv.append(option)
        if option not in ("--defer", "--no-gantt", "--json", "--bogus"):
            files = ("out.json", "out.png", "no/such/folder/out", ".", "in.json", "missing\nfile", "\x00")
            argv.append(draw.choice(files if draw.random() < 0.5 else WORDS))
    return argv


CASES = {
    "settings": settings_case,
    "arguments": arguments_case,
    "plan": plan_case,
    "show": show_case,
    "simulate": simulate_case,
    "configs": configs_case,
    "check": check_case,
}
WEIGHTS = (20, 20, 22, 18, 17, 3, 5)


# --- judging -------------------------------------------------------------------------------------------------


def run(argv: list[str]) -> None:
    try:
        check(lambda: command(argv))
    except Failed as error:
        raise Failed(f"tf-adapters {argv}: {error}") from error


def check(act: Callable[[], int], last_line_only: bool = False) -> None:
    """Success, or status 2 and one line on stderr; raises Failed otherwise."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a terminal
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = act()
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
            out.flush()
    except Exception:
        raise Failed(traceback.format_exc()) from None
    err.seek(0)
    said = err.read()
    if status == 0 or (status == 2 and (said.count("\n") == 1 or (last_line_only and said))):
        ANSWERS["success" if status == 0 else "refused"] += 1
        return
    raise Failed(f"status {status}, stderr: {said}")


ANSWERS: Counter[str] = Counter()
_WRITTEN: list[str] = []
_WATCHED: list[bool] = []


def _watch(event: str, details: tuple[Any, ...]) -> None:
    """An audit hook: remembers every file that is opened for writing, and every folder that is made."""
    if not _WATCHED or event not in ("open", "os.mkdir"):
        return
    path, flags = details[0], details[2] if event == "open" else os.O_WRONLY
    if event == "os.mkdir" and os.path.isdir(path):
        return  # it is there, and stays
    if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _WRITTEN.append(os.path.abspath(os.fsdecode(path)))


def outside(folder: Path) -> list[str]:
    """What was opened for writing and lies neither in the case's folder nor among the devices."""
    allowed = (os.path.realpath(folder) + os.sep, "/dev/", os.path.realpath(os.environ["MPLCONFIGDIR"]) + "/fontlist")
    return [path for path in _WRITTEN if not (os.path.realpath(path) + os.sep).startswith(allowed)]


def one_case(seed: int, number: int, folder: Path) -> str:
    """Run a case; its kind. Raises Failed."""
    draw = random.Random(f"{seed}:{number}")
    kind = draw.choices(list(CASES), WEIGHTS)[0]
    del _WRITTEN[:]
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            _WATCHED.append(True)
            with contextlib.chdir(own) if sys.version_info >= (3, 11) else _chdir(own):
                CASES[kind](draw, Path(own))
            if outside(Path(own)):
                raise Failed(f"wrote to {outside(Path(own))}")
    finally:
        _WATCHED.clear()
        faulthandler.cancel_dump_traceback_later()
    return kind


@contextlib.contextmanager
def _chdir(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def fuzz(cases: int, seed: int, folder: Path, first: int = 0) -> tuple[Counter[str], list[str]]:
    """How many cases of each kind ran, and a text for each that failed."""
    sys.addaudithook(_watch)
    os.environ["MPLCONFIGDIR"] = str(folder)  # matplotlib's own cache of fonts
    ran: Counter[str] = Counter()
    failures = []
    for number in range(first, first + cases):
        try:
            ran[one_case(seed, number, folder)] += 1
        except Failed as error:
            failures.append(f"case {number} of seed {seed}: {error}")
        except Exception:
            failures.append(f"case {number} of seed {seed}: {traceback.format_exc()}")
    return ran, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ran, failures = fuzz(args.cases, args.seed, Path(folder), args.first)
    for failure in failures[:40]:
        print(failure)
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(ran.items()))
    answers = ", ".join(f"{answer} {count}" for answer, count in sorted(ANSWERS.items()))
    print(
        f"{sum(ran.values()) + len(failures)} cases of seed {args.seed} in {time.monotonic() - begun:.0f} s: {counts}"
    )
    print(f"commands and parsers: {answers}; failures: {len(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
