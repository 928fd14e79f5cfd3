"""``deepspeed --module tf_adapters.deepspeed SCRIPT.py``: the real launcher on the example, and other scripts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed_ranks import PLAIN
from example_runs import said
from launching import BIN, deepspeed, forked_deepspeed

from tf_adapters.deepspeed.__main__ import main, split_arguments
from tf_adapters.report import Report
from tf_adapters.testing.ranks import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SECTION = {"max_freeze_ratio": 0.8, "warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2}
STEPS = 17  # the report says "stable" from the tenth stable step on


def launch(
    tmp_path: Path, script: str = "examples/deepspeed_gpt/train.py", start: Any = forked_deepspeed, **config: Any
) -> tuple[int, str]:
    """Run a script on two ranks; its exit code, and all that it said."""
    settings = tmp_path / "ds_config.json"
    settings.write_text(json.dumps({**PLAIN, "steps_per_print": 1, **config}))
    sizes = ("--steps", STEPS, "--width", 16, "--blocks", 2, "--context", 8)
    return start(script, settings, *sizes)


def steps_run(output: str) -> int:
    return sum(line.startswith("steps: ") for line in output.splitlines())


# --- the launcher --------------------------------------------------------------------------------------------


@pytest.mark.programs
def test_an_unmodified_script_trains_through_all_phases(tmp_path: Path) -> None:
    code, output = launch(tmp_path, start=deepspeed, timely_freeze={**SECTION, "output_dir": str(tmp_path)})
    assert code == 0, output
    lines = said(output)
    assert sum(line.startswith("enabled: deepspeed ") for line in lines) == 1
    assert [line for line in lines if line.startswith("step ")] == [
        "step 2: monitoring, every second step with drawn freeze ratios",
        "step 6: progressive freezing",
        "step 8: stable freezing",
    ]
    assert steps_run(output) == STEPS
    assert "held-out loss" in output
    path = tmp_path / "timely_freeze" / "report.json"
    report = json.loads(path.read_text())
    assert report["status"] == "stable"
    assert report["host"]["name"] == "deepspeed"
    shown = subprocess.run([BIN / "tf-adapters", "show", path], capture_output=True, text=True, timeout=HANG_S)
    assert shown.returncode == 0, shown.stderr
    assert "stable" in shown.stdout
    assert "deepspeed" in shown.stdout


@pytest.mark.programs
def test_the_key_alone_puts_the_stages_of_an_unmodified_script_into_a_v(tmp_path: Path) -> None:
    section = {"placement": "v", "warmup_steps": 1, "monitoring_steps": 4, "progressive_steps": 2}
    code, output = launch(tmp_path, start=deepspeed, timely_freeze={**section, "output_dir": str(tmp_path)})
    assert code == 0, output
    assert steps_run(output) == STEPS
    report = Report.read(tmp_path / "timely_freeze" / "report.json")
    assert report.status == "stable"
    assert [report.schedule.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]


@pytest.mark.programs
def test_without_a_section_the_script_trains_as_ever(tmp_path: Path) -> None:
    code, output = launch(tmp_path)
    assert code == 0, output
    assert said(output) == ['disabled: the config has no "timely_freeze" section']
    assert steps_run(output) == STEPS


@pytest.mark.programs
@pytest.mark.parametrize(
    ("start", "config", "text"),
    [
        (
            forked_deepspeed,
            {"timely_freeze": {**SECTION, "max_freeze_ratio": 1.5}},
            "tf_adapters.deepspeed: error: timely_freeze.max_freeze_ratio is 1.5: allowed is a number from 0 to 1",
        ),
        (
            deepspeed,
            {"timelyfreeze": SECTION},
            'tf_adapters.deepspeed: error: unknown section "timelyfreeze" in the config: did you mean "timely_freeze"?',
        ),
    ],
    ids=["value", "section"],
)
def test_a_wrong_config_ends_the_job_before_it_trains(
    tmp_path: Path, start: Any, config: dict[str, Any], text: str
) -> None:
    code, output = launch(tmp_path, start=start, **config)
    assert code not in (0, -signal.SIGKILL)
    assert [line for line in output.splitlines() if line.endswith(text)] == [text], output
    assert "Traceback" not in output
    assert steps_run(output) == 0
    assert said(output) == []


@pytest.mark.programs
def test_a_script_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    code, output = launch(tmp_path, script="examples/no_such_script.py")
    assert code not in (0, -signal.SIGKILL)
    assert "tf_adapters.deepspeed: no such script: examples/no_such_script.py" in output
    assert "Traceback" not in output


# --- scripts of other shapes, on ranks that run already ------------------------------------------------------

BUILD = """
import json, sys
import deepspeed_ranks
from beside import WHERE
from deepspeed.pipe import LayerSpec, PipelineModule
{imports}
layers = [LayerSpec(deepspeed_ranks.Embed), LayerSpec(deepspeed_ranks.Block), LayerSpec(deepspeed_ranks.Head)]
module = PipelineModule(layers=layers, num_stages=1, loss_fn=deepspeed_ranks.loss_fn)
case = deepspeed_ranks.Case(stages=1, steps=7, output_dir=WHERE)
{call}
for step in range(case.steps):
    engine.train_batch(iter(deepspeed_ranks.batch(step, 0, case.microbatches)))
assert len(result) == 4
seen = dict(name=__name__, file=__file__, arguments=sys.argv, phase=engine.timely_freeze.controller.phase.value)
open(WHERE + "/seen.json", "w").write(json.dumps(seen))
"""
ARGUMENTS = "(model=module, model_parameters=list(module.parameters()), config=case.ds_config())"
OURS = "result = tf_adapters.deepspeed.initialize"
SCRIPTS = {
    "deepspeed.initialize": ("import deepspeed", f"result = deepspeed.initialize{ARGUMENTS}\nengine = result[0]"),
    "from deepspeed import initialize": (
        "from deepspeed import initialize",
        f"result = initialize{ARGUMENTS}\nengine, *_ = result",
    ),
    "our initialize": ("import tf_adapters.deepspeed", f"{OURS}{ARGUMENTS}\nengine = result[0]"),
    "attach as well": (
        "import deepspeed, tf_adapters.deepspeed",
        f"result = deepspeed.initialize{ARGUMENTS}\nengine = result[0]\n"
        "assert tf_adapters.deepspeed.attach(engine) is engine.timely_freeze",
    ),
}


@pytest.mark.distributed
@pytest.mark.parametrize("shape", SCRIPTS)
def test_a_script_freezes_however_it_makes_its_engine(pools: Any, shape: str, tmp_path: Path) -> None:
    imports, call = SCRIPTS[shape]
    script = tmp_path / "script.py"
    script.write_text(BUILD.format(imports=imports, call=call))
    (tmp_path / "beside.py").write_text(f"WHERE = {str(tmp_path)!r}")
    (enabled,) = pools(1).run(run_main, ["--local_rank=0", str(script), "--mine", "3"])
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == {
        "name": "__main__",
        "file": str(script),
        "arguments": [str(script), "--local_rank=0", "--mine", "3"],
        "phase": "stable",
    }
    assert enabled == 1


def run_main(arguments: list[str]) -> int:
    """On a rank: what the launcher starts, in this process; how often freezing was announced."""
    import logging

    import deepspeed

    announced: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: announced.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tf_adapters").addHandler(handler)
    before = deepspeed.initialize, list(sys.argv), list(sys.path)
    sys.argv = ["tf_adapters.deepspeed", *arguments]
    sys.modules.pop("beside", None)
    try:
        main()
    finally:
        deepspeed.initialize, sys.argv[:], sys.path[:] = before
        logging.getLogger("tf_adapters").removeHandler(handler)
    return sum(text.startswith("timely_freeze: enabled: ") for text in announced)


# --- arguments -----------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.mark.parametrize("rank", [[], ["--local_rank=0"], ["--local_rank=12"], ["--local-rank=0"]])
def test_the_script_sees_what_it_would_see_without_us(script: str, rank: list[str]) -> None:
    mine = ["--lr", "0.1", "other.py", "--local_rank_of_mine=1"]
    assert split_arguments([*rank, script, *mine]) == (script, [*rank, *mine])


def test_a_local_rank_after_the_script_is_the_scripts_own(script: str) -> None:
    assert split_arguments([script, "--local_rank=3", "-h"]) == (script, ["--local_rank=3", "-h"])


@pytest.mark.parametrize("arguments", [[], ["--local_rank=0"]])
def test_no_script_is_answered_with_the_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        split_arguments(arguments)
    assert caught.value.code == "usage: deepspeed --module tf_adapters.deepspeed SCRIPT.py [its arguments]"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_the_usage_and_no_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        split_arguments(["--local_rank=0", flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: deepspeed --module tf_adapters.deepspeed SCRIPT.py")


@pytest.mark.parametrize("name", ["no_such.py", "--unknown-option", "."])
def test_what_is_no_script_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        split_arguments(["--local_rank=0", name, "--lr", "1"])
    assert caught.value.code == f"tf_adapters.deepspeed: no such script: {name}"
