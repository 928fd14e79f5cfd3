"""What a stranger installs: wheel and sdist, from which the commands and the demo's example run without a checkout.

The wheel is installed into an empty environment; its dependencies come from the environment of this test, by a path
file, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from pages import COMMANDS, write_inputs

import tf_adapters
from tf_adapters.cli import main
from tf_adapters.cli.configs import ready_configs
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.testing.ranks import HANG_S, free_port

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import setuptools.build_meta as b; print(b.build_sdist({0!r})); print(b.build_wheel({0!r}))"
RUN_COMMANDS = """
import json, tf_adapters.cli
commands = json.load(open("commands.json"))
statuses = [tf_adapters.__file__, *map(tf_adapters.cli.main, commands)]
json.dump(statuses, open("statuses.json", "w"))
"""
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "runs", "results", "*.egg-info", "__pycache__")


@dataclass(frozen=True)
class Installed:
    """An environment that holds the wheel, and what was built."""

    bin: Path
    packages: Path
    wheel: Path
    sdist: Path

    def run(self, *command: object, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        # ninja, which DeepSpeed looks for, is beside the interpreter of this test.
        path = os.pathsep.join([str(self.bin), str(Path(sys.executable).parent), environment["PATH"]])
        return subprocess.run(
            [str(self.bin / str(command[0])), *map(str, command[1:])],
            cwd=cwd,
            env={**environment, "PATH": path, **settings},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    pytest.importorskip("setuptools", minversion="70.1")  # older ones need the package wheel to build one
    folder = tmp_path_factory.mktemp("release")
    source, dist = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
    dist.mkdir()
    build = subprocess.run(
        [sys.executable, "-c", BUILD.format(str(dist))], cwd=source, capture_output=True, text=True, check=False
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    packages = folder / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    _install(wheel, packages)
    return Installed(folder / "venv" / "bin", packages, wheel, sdist)


def _install(wheel: Path, packages: Path) -> None:
    """With the pip of this test, which needs no pip in the environment."""
    command = [sys.executable, "-m", "pip", "--quiet", "--python", str(packages.parents[2] / "bin" / "python")]
    options = ["install", "--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile", str(wheel)]
    subprocess.run([*command, *options], check=True, capture_output=True)
    # After the environment's own: the checkout, which an editable install puts on the path by a .pth, is not read here.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


@pytest.mark.programs
def test_the_wheel_holds_the_packages_and_the_configs(installed: Installed) -> None:
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "tf_adapters",
        "megatron_patches",
        "deepspeed_configs",
    }
    assert "tf_adapters/py.typed" in names
    assert {f"deepspeed_configs/{name}.json" for name in ready_configs()} <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)
    assert tf_adapters.__version__ in installed.wheel.name


@pytest.mark.programs
def test_the_sdist_holds_what_a_checkout_holds(installed: Installed) -> None:
    with tarfile.open(installed.sdist) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    tracked = ["LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "mkdocs.yml", "tests/programs/test_release.py"]
    assert {*tracked, "examples/deepspeed_gpt/demo.py", "docs/settings.md", "deepspeed_configs/plain.json"} <= names


@pytest.mark.programs
def test_the_installed_commands_work_without_a_checkout(installed: Installed, tmp_path: Path) -> None:
    where = installed.run("python", "-c", "import tf_adapters; print(tf_adapters.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.packages), where.stdout + where.stderr
    doctor = installed.run("tf-adapters", "doctor", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert re.search(rf"tf-adapters +{re.escape(tf_adapters.__version__)}\n", doctor.stdout)


@pytest.mark.programs
def test_the_documented_commands_run_without_a_checkout(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs()
    documented = [one.words[1:] for one in COMMANDS if one.words[0] == "tf-adapters" and len(one.words) > 2]
    (tmp_path / "commands.json").write_text(json.dumps(documented))
    ran = installed.run("python", "-c", RUN_COMMANDS, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    where, *statuses = json.loads((tmp_path / "statuses.json").read_text())
    assert Path(where).is_relative_to(installed.packages)
    failed = [shlex.join(words) for words, status in zip(documented, statuses, strict=True) if status != 0]
    assert not failed


@pytest.mark.programs
def test_the_demos_example_trains_on_two_ranks_from_the_wheel(installed: Installed, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    with tarfile.open(installed.sdist) as sdist:
        examples = [entry for entry in sdist.getmembers() if "/examples/" in entry.name]
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        sdist.extractall(tmp_path, members=examples, **safely)
    (folder,) = tmp_path.glob("*/examples")
    copied = installed.run("tf-adapters", "configs", "plain", "--copy", "ds_config.json", cwd=tmp_path)
    assert copied.returncode == 0, copied.stderr
    config = json.loads((tmp_path / "ds_config.json").read_text())
    config["timely_freeze"] |= {"warmup_steps": 0, "monitoring_steps": 4, "progressive_steps": 2}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    script = folder / "deepspeed_gpt" / "train.py"
    sizes = ["--steps", "8", "--width", "16", "--blocks", "2", "--context", "8"]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command = [*ranks, "-m", "tf_adapters.deepspeed", script, "--deepspeed_config", "ds_config.json", *sizes]
    run = installed.run("python", *command, cwd=tmp_path, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "timely_freeze" / "report.json").read_text())
    assert report["status"] == "stable"


# --- tf-adapters configs -------------------------------------------------------------------------------------


def test_every_ready_config_is_listed_and_has_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out.split()
    files = (ROOT / "deepspeed_configs").rglob("*.json")
    assert listed == sorted(str(file.relative_to(ROOT / "deepspeed_configs"))[: -len(".json")] for file in files)
    for name in listed:
        assert main(["configs", name]) == 0
        section = json.loads(capsys.readouterr().out)["timely_freeze"]
        assert TimelyFreezeConfig.parse(section).enabled


def test_a_config_is_copied_but_never_over_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.json"
    assert main(["configs", "paper/llama_3_8b.json", "--copy", str(target)]) == 0
    assert target.read_text() == (ROOT / "deepspeed_configs" / "paper" / "llama_3_8b.json").read_text()
    capsys.readouterr()
    assert main(["configs", "plain", "--copy", str(target)]) == 2
    assert capsys.readouterr().err == f"tf-adapters configs: --copy: {target} exists; it is not replaced\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "NAME is 'plan': allowed are activation_checkpointing,"),
        (["../pyproject"], "NAME is '../pyproject': allowed are "),
        (["plain", "--copy", "no/such/folder/a.json"], "--copy: cannot write 'no/such/folder/a.json': No such file"),
        (["--copy", "a.json"], "--copy: give the NAME of the config to copy"),
    ],
)
def test_wrong_arguments_of_configs_end_with_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["configs", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tf-adapters configs: {said}")
    assert error.count("\n") == 1


# --- what SECURITY.md says ---------------------------------------------------------------------------------------


def test_pickle_is_for_messages_between_ranks_only() -> None:
    """Nothing is unpickled from a file: no module but these imports a pickle or loads with torch."""
    unpickling = re.compile(
        r"^\s*(?:import|from) (?:pickle|dill|cloudpickle|shelve|marshal)\b|torch\.load\(|np\.load\("
    )
    modules = [*(ROOT / "tf_adapters").rglob("*.py"), *(ROOT / "megatron_patches").rglob("*.py")]
    using = {
        str(path.relative_to(ROOT))
        for path in modules
        if any(unpickling.search(line) for line in path.read_text().splitlines())
    }
    assert using == {"tf_adapters/collectives.py", "tf_adapters/testing/ranks.py"}  # bytes of another rank, of a pipe


# --- one version, a changelog --------------------------------------------------------------------------------


def test_the_version_is_written_in_one_place() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'version = { attr = "tf_adapters.__version__" }' in project
    assert not re.search(r'^version = "', project, re.MULTILINE)


def test_the_changelog_is_in_the_keep_a_changelog_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert releases[1:]
    for release in releases[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", release), release
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= allowed
    assert releases[1].startswith(f"[{tf_adapters.__version__}]")
