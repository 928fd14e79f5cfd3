"""Unedited TorchTitan jobs with freezing: arguments and TOML files, schedules, checkpoints, logs, refusals."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from launching import ROOT
from torchtitan_jobs import (
    FOLDER,
    FREEZING,
    MODEL,
    OLD,
    PIPELINE,
    TRAINING,
    Outcome,
    installs,
    make_assets,
    run_jobs,
    sizes_of,
)

from tf_adapters.config import REMOVED, TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.report import Report
from tf_adapters.trainers.torchtitan import main
from tf_adapters.trainers.torchtitan_norm import meetings
from tf_adapters.trainers.torchtitan_settings import JobSettings

ERROR = "tf_adapters.trainers.torchtitan: error: "

# --- settings, in one process ------------------------------------------------------------------------------------


def test_arguments_go_before_the_file_and_the_rest_is_torchtitans() -> None:
    given = ["--timely_freeze.max-freeze-ratio=0.3", "--training.steps", "5", "--timely-freeze.method", "timely+apf"]
    settings = JobSettings(given)
    assert settings.rest == ["--training.steps", "5"]
    left = settings.take_section({"timely_freeze": {"enable": True, "max_freeze_ratio": 0.6, "seed": 3}, "model": {}})
    assert left == {"model": {}}
    config = settings.config("out")
    assert config is not None
    assert (config.max_freeze_ratio, config.method, config.seed, config.output_dir) == (0.3, "timely+apf", 3, "out")


def test_nothing_is_frozen_unless_it_is_switched_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert JobSettings(["--training.steps", "5"]).config("out") is None
    settings = JobSettings(["--timely_freeze.seed", "5"])
    with pytest.raises(SystemExit) as end:
        settings.config("out")
    assert end.value.code == 2
    line = "--timely_freeze.seed is 5, but --timely_freeze.enable is not given"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--timely_freeze.max_freeze_ratio", "2"], "--timely_freeze.max_freeze_ratio is '2': allowed is"),
        (["--timely_freeze.granularity=row"], "--timely_freeze.granularity is 'row': allowed is"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        JobSettings(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("value", ["synchronous", "post_validated"])
def test_a_removed_setting_is_refused_in_one_line(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"timely_freeze.optimizer_step is retired: {REMOVED['optimizer_step']}"
    with pytest.raises(SystemExit) as end:
        JobSettings(["--timely_freeze.optimizer_step", value])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"{ERROR}{line}\n"
    with pytest.raises(ConfigError) as caught:
        JobSettings([]).take_section({"timely_freeze": {"enable": True, "optimizer_step": value}})
    assert str(caught.value) == line


def test_a_misspelt_argument_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="max_freeze_ration"):
        JobSettings(["--timely_freeze.max_freeze_ration", "0.5"])


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"enable": "yes"}, "timely_freeze.enable is 'yes': allowed is true or false"),
        ({"enable": True, "max_freeze_ratio": 3}, "max_freeze_ratio is 3"),
        ({"enable": True, "max_ratio": 0.5}, "max_ratio"),
        (0.5, "it must be an object of settings"),
    ],
)
def test_a_wrong_section_is_refused_by_name(section: object, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        JobSettings([]).take_section({"timely_freeze": section})


def test_a_module_that_torchtitan_lacks_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TorchTitan imports triton, which PyTorch's builds without a GPU do not bring."""
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    monkeypatch.setattr(sys, "argv", ["tf_adapters.trainers.torchtitan", "--timely_freeze.enable"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{ERROR}torchtitan needs torchtitan.config, which is not installed")
    assert said.count("\n") == 1


# --- jobs on two ranks ---------------------------------------------------------------------------------------------

with_torchtitan = pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
with_job_files = pytest.mark.skipif(not OLD, reason="torchtitan 0.3 has no job files")
LLAMA = (*MODEL, *TRAINING, *PIPELINE)
# 0.3's debug model has selective activation checkpointing, with which torch's split backwards fail, also without us.
SCHEDULES = ("GPipe", "Interleaved1F1B", *(["ZBVZeroBubble"] if OLD else []))
DEFERRED_TOKENS = ("--timely_freeze.weight_gradients=deferred", "--timely_freeze.granularity=token")
EXACT = ("--timely_freeze.weight_gradients=deferred", "--timely_freeze.max_freeze_ratio", "0")
CLIPPED = ("--training.max_norm", "0.5")  # which these gradients exceed
COMPILED = ("--compile.enable", "--activation_checkpoint.mode", "selective")
COMPILED_INTERLEAVED = (
    *("--compile.enable", "--activation_checkpoint.mode", "full"),
    *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
)
UNCLIPPED = ("--training.max_norm", "inf")
CHECKPOINTS = ("--checkpoint.enable", "--checkpoint.interval", "14", "--checkpoint.no-last-save-model-only")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """All of them in one pair of processes, by name and rank."""
    folder = tmp_path_factory.mktemp("torchtitan")
    make_assets(folder)
    toml = folder / "job.toml"
    toml.write_text('[timely_freeze]\nenable = true\nmax_freeze_ratio = 0.6\n[job]\ndump_folder = "from toml"\n')
    wrong = folder / "wrong.toml"
    wrong.write_text("[timely_freeze]\nenable = true\nmax_freeze_ratio = 6\n")

    def job(name: str, *arguments: str, steps: int = 14) -> tuple[str, ...]:
        return (FOLDER, name, "--training.steps", str(steps), *arguments)

    given = {
        "alone": job("alone", *LLAMA),
        "nothing frozen": job("nothing", *LLAMA, *FREEZING, "--timely_freeze.max_freeze_ratio", "0"),
        **{name: job(name, *LLAMA, *FREEZING, "--parallelism.pipeline_parallel_schedule", name) for name in SCHEDULES},
        "deferred tokens": job(
            "deferred",
            *LLAMA,
            *FREEZING,
            "--timely_freeze.weight_gradients=deferred",
            "--timely_freeze.granularity=token",
        ),
        "unclipped, alone": job("unclipped alone", *LLAMA, *UNCLIPPED),
        "unclipped": job("unclipped", *LLAMA, *UNCLIPPED, *FREEZING, *EXACT),
        "compiled, alone": job("compiled alone", *LLAMA, *COMPILED),
        "compiled": job("compiled", *LLAMA, *COMPILED, *FREEZING, *EXACT),
        "compiled, interleaved, alone": job("compiled interleaved alone", *LLAMA, *COMPILED_INTERLEAVED),
        "compiled, interleaved": job("compiled interleaved", *LLAMA, *COMPILED_INTERLEAVED, *FREEZING, *EXACT),
        "clipped, alone": job("clipped alone", *LLAMA, *CLIPPED),
        "clipped": job("clipped", *LLAMA, *CLIPPED, *FREEZING, *EXACT),
        "whole": job("run", *LLAMA, *FREEZING, *CHECKPOINTS, steps=18),
        "resumed": job("run", *LLAMA, *FREEZING, *CHECKPOINTS, "--checkpoint.load_step", "14", steps=18),
        "alone, saved": job("other", *LLAMA, *CHECKPOINTS),
        "begun later": job("other", *LLAMA, *FREEZING, *CHECKPOINTS, steps=26),
        "no pipeline": job("none", *MODEL, *TRAINING, *FREEZING),
    }
    if OLD:
        given["from a file"] = ("--job.config_file", str(toml), *LLAMA, "--training.steps", "10")
        given["wrong file"] = ("--job.config_file", str(wrong), *LLAMA)
    outcomes = dict(zip(given, run_jobs(folder, list(given.values())), strict=True))
    for name, of_ranks in outcomes.items():
        for outcome in of_ranks:
            assert outcome.status == (2 if name in ("no pipeline", "wrong file") else 0), (name, outcome.said)
    outcomes["folder"] = [Outcome(said=str(folder))]
    return outcomes


def report_of(jobs: dict[str, list[Outcome]], name: str) -> Report:
    return Report.read(Path(jobs["folder"][0].said) / name / "timely_freeze" / "report.json")


@with_torchtitan
@pytest.mark.programs
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_freeze_to_the_end(jobs: dict[str, list[Outcome]], name: str) -> None:
    report = report_of(jobs, name)
    assert report.status == "stable"
    assert report.plan is not None
    assert any(any(shares) for shares in report.frozen_share.values())  # while monitoring at the latest
    figures = jobs[name][0].figures[14]
    assert 0.0 <= figures["timely_freeze/afr_stage_0"] <= 1.0
    assert figures["timely_freeze/planned_step_ms"] > 0.0


@with_torchtitan
@pytest.mark.programs
def test_with_nothing_frozen_it_trains_as_torchtitan_alone(jobs: dict[str, list[Outcome]]) -> None:
    for ours, alone in zip(jobs["nothing frozen"], jobs["alone"], strict=True):
        assert ours.losses == alone.losses
        assert len(alone.losses) == 14


@with_torchtitan
@pytest.mark.programs
def test_the_norm_of_gradients_that_are_not_clipped_is_late_and_the_same(jobs: dict[str, list[Outcome]]) -> None:
    for ours, alone in zip(jobs["unclipped"], jobs["unclipped, alone"], strict=True):
        assert ours.losses == alone.losses
        norms, hosts = ([of.norms[step] for step in range(1, 15)] for of in (ours, alone))
        assert norms == pytest.approx(hosts, rel=1e-5)
    line = "training.max_norm is inf: the norm of all gradients is only logged, and no rank waits for it"
    assert jobs["unclipped"][0].said.count(line) == 1
    assert line not in jobs["clipped"][0].said


@with_torchtitan
@pytest.mark.programs
@pytest.mark.parametrize("folder", ["compiled", "compiled interleaved"])
def test_compiled_blocks_wait(jobs: dict[str, list[Outcome]], folder: str) -> None:
    assert min(report_of(jobs, folder).tapped_share.values()) > 0.8


@with_torchtitan
@pytest.mark.programs
@pytest.mark.parametrize("name", ["clipped", "compiled", "compiled, interleaved"])
def test_deferral_trains_and_clips_as_torchtitan_alone(jobs: dict[str, list[Outcome]], name: str) -> None:
    for ours, alone in zip(jobs[name], jobs[f"{name}, alone"], strict=True):
        assert ours.losses == alone.losses
        assert ours.norms == alone.norms


@pytest.mark.parametrize(
    ("max_norm", "log_freq", "found"),
    [
        (1.0, 10, ("training.max_norm 1",)),
        (float("inf"), 10, ()),
        (float("inf"), 1, ("the norm of all gradients, which metrics.log_freq 1 logs in every step",)),
    ],
)
def test_what_makes_ranks_meet(max_norm: float, log_freq: int, found: tuple[str, ...]) -> None:
    job = SimpleNamespace(training=SimpleNamespace(max_norm=max_norm), metrics=SimpleNamespace(log_freq=log_freq))
    assert meetings(job) == found


@with_torchtitan
@pytest.mark.programs
def test_deferred_tokens_run(jobs: dict[str, list[Outcome]]) -> None:
    report = report_of(jobs, "deferred")
    assert report.status == "stable"
    assert report.config["granularity"] == "token"


@with_torchtitan
@pytest.mark.programs
def test_a_resumed_job_repeats_the_uninterrupted_one(jobs: dict[str, list[Outcome]]) -> None:
    for whole, resumed in zip(jobs["whole"], jobs["resumed"], strict=True):
        assert sorted(resumed.losses) == [15, 16, 17, 18]
        assert all(whole.losses[step] == loss for step, loss in resumed.losses.items())


@with_torchtitan
@pytest.mark.programs
def test_a_checkpoint_without_freezing_begins_it_anew(jobs: dict[str, list[Outcome]]) -> None:
    assert sorted(jobs["begun later"][0].losses) == list(range(15, 27))
    assert report_of(jobs, "other").status == "stable"


@with_torchtitan
@pytest.mark.programs
def test_installing_twice_is_installing_once_and_other_settings_are_refused(tmp_path: Path) -> None:
    line = "timely_freeze is installed already, with other settings: revert() it first"
    assert installs(tmp_path) == [True, line, True] * 2


@with_torchtitan
@with_job_files
@pytest.mark.programs
def test_a_toml_file_has_settings(jobs: dict[str, list[Outcome]]) -> None:
    assert report_of(jobs, "from toml").config["max_freeze_ratio"] == 0.6


@with_torchtitan
@pytest.mark.programs
def test_what_cannot_be_is_one_line(jobs: dict[str, list[Outcome]]) -> None:
    for name, line in (
        ("no pipeline", f"{ERROR}timely_freeze cannot run here: TorchTitan trains without a pipeline"),
        ("wrong file", "max_freeze_ratio is 6"),
    ):
        if name not in jobs:
            continue
        said = [of_line for of_line in jobs[name][0].said.splitlines() if ERROR in of_line]
        assert len(said) == 1
        assert line in said[0]
        assert "Traceback" not in jobs[name][0].said


@with_torchtitan
@with_job_files
@pytest.mark.programs
def test_the_papers_job_files_are_its_models_and_settings() -> None:
    paper = ROOT / "deepspeed_configs" / "paper"
    sizes = sizes_of(sorted((ROOT / "examples" / "torchtitan").glob("*.toml")))
    billions = {name: round(elements / 1e9, 2) for name, (elements, _) in sizes.items()}
    assert billions == {"llama_3.2_1b": 1.5, "llama_3_8b": 8.03, "llama_2_13b": 13.02}
    for name, (_, config) in sizes.items():
        expected = TimelyFreezeConfig.parse(json.loads((paper / f"{name}.json").read_text())["timely_freeze"])
        assert config.model_copy(update={"output_dir": expected.output_dir}) == expected
