"""README, docs and the examples' READMEs: their commands run or parse, and what they name exists.

Commands that start a training are not run here; their scripts, modules, files and options are looked up.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pages import COMMANDS, PAGES, ROOT, Command, write_inputs
from torch.distributed.run import get_args_parser

import tf_adapters.cli
from tf_adapters.arguments import add_arguments, config_from_args
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.goals import LEVERS
from tf_adapters.testing import emulated_device
from tf_adapters.trainers.torchtitan_settings import JobSettings

RESULTS = ROOT / "benchmarks" / "results"
USERS_OWN = {"train.py", "pretrain_gpt.py", "ds_config.json"}
"""Files of the reader's, which README and docs name as examples; an example's own page must name files that exist."""


def of_program(*programs: str) -> pytest.MarkDecorator:
    mine = [one for one in COMMANDS if one.words[0] in programs]
    assert mine, programs
    return pytest.mark.parametrize("command", mine, ids=str)


# --- commands ------------------------------------------------------------------------------------------------


@of_program("make")
def test_a_make_target_exists(command: Command) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command.words[1] in targets


@of_program("pip")
def test_an_extra_that_is_installed_exists(command: Command) -> None:
    extras = re.search(
        r"^\[project.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert extras is not None
    for word in command.words:
        assert not word.startswith("tf-adapters"), "it is on no index: name the checkout, '.[extra]'"
        if match := re.fullmatch(r"\.\[(.*)\]", word):
            assert set(match[1].split(",")) <= set(re.findall(r"^(\w+) = ", extras[1], re.MULTILINE))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the files that commands of the pages read."""
    monkeypatch.chdir(tmp_path)
    write_inputs()


@pytest.mark.usefixtures("inputs")
@of_program("tf-adapters")
def test_our_command_runs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    if len(command.words) < 3 and command.words[1:] not in (("doctor",), ("schema",)):
        pytest.skip("only the name of a command")
    if command.words[1] == "check":
        Path(command.words[2]).write_text('{"timely_freeze": {}}')
    capsys.readouterr()
    assert tf_adapters.cli.main(command.words[1:]) == 0
    assert capsys.readouterr().out


@of_program("deepspeed", "torchrun", "python")
def test_a_launch_names_what_exists(command: Command) -> None:
    folder = command.page.parent
    if any("torchtitan" in word for word in command.words):
        check_job(command.words, folder)
        return
    launched: list[str] = []
    options, of_module, script = launched, [], None
    words = list(command.words[1:])
    while words:
        word = words.pop(0)
        if word in ("-m", "--module"):
            module = words.pop(0)
            found = importlib.util.find_spec(module)
            assert found
            if module.startswith("benchmarks."):
                script = Path(str(found.origin))
                break
            options = of_module if module == emulated_device.__name__ else launched
        elif word.endswith(".py"):
            script = folder / word
            break
        else:
            options.append(word)
    assert script is not None
    assert script.exists() or (script.name in USERS_OWN and "examples" not in str(command.page)), script
    check_launcher(command.words[0], launched)
    if of_module:
        emulated_device.parse([*of_module, "train.py"])
    files = [word for word in words if word.endswith(".json")]
    assert all((folder / name).exists() or name in USERS_OWN for name in files)
    of_freezing = [word for word in words if word.startswith("--timely-freeze")]
    config_from_args(add_arguments(argparse.ArgumentParser()).parse_known_args(words)[0])
    if script.exists():
        sources = "".join(path.read_text() for path in {*script.parent.glob("*.py"), script})
        options = [word for word in words if word.startswith("--") and word not in of_freezing]
        assert all(f'"{option}"' in sources or option == "--deepspeed_config" for option in options), options


def check_job(words: Sequence[str], folder: Path) -> None:
    """A TorchTitan job: modules that are there, a job file, and settings that are accepted."""
    begin = words.index("-m")
    check_launcher(words[0], [*words[1:begin]])
    modules = [after for word, after in itertools.pairwise(words) if word == "-m"]
    assert all(importlib.util.find_spec(module) for module in modules if module != "torchtitan.train")
    rest = JobSettings(words[begin + 2 * len(modules) :]).rest
    assert [rest[0], *rest[2:]] == ["--job.config_file"]
    assert rest[1] == "job.toml" or (folder / rest[1]).exists()


def check_launcher(program: str, options: list[str]) -> None:
    """Whether a launcher knows its options; "..." stands for more of the reader's own."""
    options = [word for word in options if word != "..."]
    if program == "torchrun":
        get_args_parser().parse_args([*options, "script.py"])
    elif program == "deepspeed":
        host = pytest.importorskip("deepspeed.launcher.runner")
        host.parse_args([*options, "script.py"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_arguments_of_freezing_are_accepted(page: Path) -> None:
    """Those that stand by themselves, as in a table of arguments for Megatron-LM."""
    for span in re.findall(r"`(--timely-freeze-[a-z-]+ [^`]+)`", page.read_text()):
        parser = add_arguments(argparse.ArgumentParser())
        assert config_from_args(parser.parse_args(["--timely-freeze", *shlex.split(span)]))


# --- what is named -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_of_the_package_exists(page: Path) -> None:
    """Attributes and submodules; those that only exist with a host are looked for without importing it."""
    for name in set(re.findall(r"\btf_adapters((?:\.[a-z]\w*)+)", page.read_text())):
        of_name: Any = tf_adapters
        path = "tf_adapters"
        for part in name[1:].split("."):
            path += f".{part}"
            if "." not in name[1:] or path.startswith("tf_adapters.testing"):
                assert importlib.util.find_spec(path) or hasattr(of_name, part), f"{page}: {path}"
                continue
            if not hasattr(of_name, part):
                assert importlib.util.find_spec(path), f"{page}: {path}"
                break
            of_name = getattr(of_name, part)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


def anchors(text: str) -> set[str]:
    """Where a page can be entered: headings as GitHub spells them, and named places."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    spelt = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return spelt | set(re.findall(r'<a name="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "benchmarks|tests|docs|examples|deepspeed_configs|megatron_patches|tf_adapters"
    for path in re.findall(rf"\b((?:{folders})/[\w/.*-]*[\w*/])", page.read_text()):
        assert list(ROOT.glob(path.rstrip("/"))), path


def test_every_setting_is_explained_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (by `goal`|`.*?`) \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    fields = TimelyFreezeConfig.model_fields
    by_goal = [name for name, default in rows if default == "by `goal`"]
    assert by_goal == list(LEVERS)
    assert {name: json.loads(default.strip("`")) for name, default in rows if name not in by_goal} == {
        name: field.default for name, field in fields.items() if name not in by_goal
    }


def test_the_table_of_benchmarks_has_every_command() -> None:
    page = ROOT / "benchmarks" / "README.md"
    scripts = [path for path in page.parent.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    named = re.findall(r"^\| `python -m (benchmarks\.[a-z_.]+)", page.read_text(), re.MULTILINE)
    assert set(named) == {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in scripts}


# --- figures -------------------------------------------------------------------------------------------------


def test_the_readme_shows_the_committed_speeds() -> None:
    from benchmarks.hosts.speed import read_rows, table

    assert table(read_rows()) in (ROOT / "README.md").read_text()


def test_the_study_shows_its_committed_runs() -> None:
    from benchmarks.accuracy.cells import METHODS, read_records
    from benchmarks.accuracy.figures import by_run
    from benchmarks.accuracy.study import STUDIED
    from benchmarks.accuracy.table import markdown

    records = read_records(RESULTS / "accuracy" / "study.jsonl")
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert markdown(records) in page
    of_methods = [run for cell, run in by_run(records) if cell.task in STUDIED and cell.group[2] in METHODS]
    held = [run.kappa_below_p_eff for run in of_methods if run.kappa_below_p_eff is not None]
    assert f"held in {sum(held):.0f} of the {len(held)} runs" in page
    assert f"held in {sum(held):.0f} of {len(held)} runs" in (ROOT / "README.md").read_text().replace("\n  ", " ")


def test_the_page_on_measuring_shows_what_is_printed_of_its_committed_report(tmp_path, monkeypatch) -> None:
    from benchmarks.hosts.measure import RESULTS, shown, table

    record, page = json.loads(RESULTS.read_text()), (ROOT / "docs" / "measure.md").read_text()
    monkeypatch.chdir(tmp_path)
    assert shown(record["report"]) in page
    assert table(record) in page


def test_the_page_on_the_algorithm_shows_the_committed_draws() -> None:
    page = (ROOT / "docs" / "algorithm.md").read_text()
    for stage, plans in json.loads((RESULTS / "core" / "selection.json").read_text())["draws"].items():
        cells = [found[f"deviation, {how}"] for found in plans.values() for how in ("together", "each for itself")]
        assert f"| {stage} | {' | '.join(f'{cell:.2%}' for cell in cells)} |" in page


def test_the_page_on_selection_shows_its_committed_figures() -> None:
    page = (ROOT / "docs" / "selection.md").read_text()
    selection = json.loads((RESULTS / "core" / "selection.json").read_text())
    for estimate in ("apf score, tensor", "layer's update norm"):
        for cut in ("as one stage", "as four stages"):
            errors = selection["relative_error"][f"{estimate}, {cut}"]
            assert " | ".join(f"{errors[name]:.1%}" for name in ("median", "p95", "max")) in page
