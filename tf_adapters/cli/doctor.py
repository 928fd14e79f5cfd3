"""``tf-adapters doctor``: show what is installed, which hosts can be used, and the command that installs what is
missing.

Versions come from the packages' metadata: importing a host to ask for its version could start compilers
or CUDA.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = [
    "HOSTS",
    "TRAINERS",
    "SupportedHost",
    "add_parser",
    "diagnose",
    "installed_versions",
    "interrupted_builds",
    "render",
    "run",
]

_CORE = {"torch": "2.5", "numpy": "1.26", "ortools": "9.10", "pydantic": "2.6", "scipy": "1.12"}
_EXTRAS = {"matplotlib": ("plot", "Gantt charts"), "rich": ("cli", "coloured tables")}
_BUILD_S = 600.0  # a lock older than this was left by a build that was killed

Versions = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class SupportedHost:
    """A host that has an adapter: what pip is given, the oldest and newest version that the adapter's tests pass with.

    The README's support table says what works on it. A trainer on top of another host names that ``on``; it is
    nothing to install for our sake.
    """

    name: str
    package: str
    install: str
    oldest: str
    newest: str
    on: str = ""


HOSTS = (
    SupportedHost("deepspeed", "deepspeed", "tf-adapters[deepspeed]", oldest="0.19.3", newest="0.19.8"),
    SupportedHost("megatron-core", "megatron-core", "tf-adapters[megatron]", oldest="0.16.1", newest="0.19.2"),
    SupportedHost("torch.distributed.pipelining", "torch", "torch>=2.13", oldest="2.13", newest="2.15"),
    SupportedHost("torchtitan", "torchtitan", "tf-adapters[torchtitan]", oldest="0.2.2", newest="0.3.0"),
)
TRAINERS = (
    SupportedHost("Megatron-Bridge", "megatron-bridge", "", oldest="0.3.1", newest="0.3.1", on="megatron-core"),
    SupportedHost("ms-swift", "ms-swift", "", oldest="4.6.0", newest="4.6.0", on="megatron-core"),
    SupportedHost("slime", "slime", "", oldest="0.3.1", newest="0.3.1", on="megatron-core"),
    SupportedHost(
        "NeMo AutoModel", "nemo-automodel", "", oldest="0.7.0", newest="0.7.0", on="torch.distributed.pipelining"
    ),
)
"""Trainers that have a way in of their own."""
_PACKAGES = tuple(dict.fromkeys((*_CORE, *(host.package for host in (*HOSTS, *TRAINERS)), *_EXTRAS)))


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The state of one host. ``remedy`` is a command line; it is empty if the host can be used."""

    name: str
    usable: bool
    finding: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of ``diagnose``. ``problems`` keep every host from working, ``hints`` keep none."""

    versions: dict[str, str | None]
    hosts: tuple[HostCheck, ...]
    trainers: tuple[HostCheck, ...]
    problems: tuple[str, ...]
    hints: tuple[str, ...]

    @property
    def ready(self) -> tuple[str, ...]:
        """The hosts and trainers that can be used as things are."""
        return () if self.problems else tuple(one.name for one in (*self.hosts, *self.trainers) if one.usable)


def installed_versions() -> dict[str, str | None]:
    """Version of Python and of each package that matters here; None for what is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("tf-adapters", *_PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def interrupted_builds(root: Path | None = None, older_than_s: float = _BUILD_S) -> tuple[Path, ...]:
    """Locks that killed builds of torch extensions left behind: whoever needs such an extension waits forever.

    ``root`` is where torch keeps what it compiles, by default as torch finds it.
    """
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = root or (Path(configured) if configured else Path.home() / ".cache" / "torch_extensions")
    locks = [path for path in root.rglob("lock") if path.is_file()]
    return tuple(sorted(path for path in locks if time.time() - path.stat().st_mtime > older_than_s))


def diagnose(versions: Versions, locks: Sequence[Path] = ()) -> Diagnosis:
    """Judge ``versions``, as ``installed_versions`` gives them; a missing key counts as not installed.

    ``locks`` are those of ``interrupted_builds``.
    """
    hints = tuple(
        f'no {package}, so no {use}: pip install "tf-adapters[{extra}]"'
        for package, (extra, use) in _EXTRAS.items()
        if versions.get(package) is None
    )
    hosts = tuple(_check_host(host, versions.get(host.package)) for host in HOSTS)
    usable = {host.name for host in hosts if host.usable}
    trainers = tuple(_check_trainer(trainer, versions.get(trainer.package), usable) for trainer in TRAINERS)
    killed = "a build of {} was killed, and training would wait for it forever: rm {}".format
    problems = (*_core_problems(versions), *(killed(lock.parent.name, lock) for lock in locks))
    return Diagnosis(dict(versions), hosts, trainers=trainers, problems=problems, hints=hints)


def devices() -> str:
    """The accelerators torch sees, in one line."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"unknown: torch cannot be imported ({str(error).splitlines()[0]})"
    if not torch.cuda.is_available():
        return f"CPU only ({torch.get_num_threads()} threads): fine for trying things out"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def render(diagnosis: Diagnosis, seen: str) -> str:
    """The diagnosis as text; ``seen`` is the line about devices."""
    width = max(len(name) for name in diagnosis.versions)
    lines = ["Versions"]
    lines += [f"  {name:<{width}}  {version or '-'}" for name, version in diagnosis.versions.items()]
    lines += ["", "Devices", f"  {seen}"]
    for title, checks in (("Hosts", diagnosis.hosts), ("Trainers on top of them", diagnosis.trainers)):
        lines += ["", title]
        for check in checks:
            lines.append(f"  {check.name}: {check.finding}")
            lines += [f"    mend it: {check.remedy}"] if check.remedy else []
    for title, notes in (("Problems", diagnosis.problems), ("Optional", diagnosis.hints)):
        if notes:
            lines += ["", title, *(f"  {note}" for note in notes)]
    return "\n".join([*lines, "", _closing_line(diagnosis)])


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "say what is installed, which host can be used, and what to install"
    parser = subparsers.add_parser("doctor", help=about, description=f"tf-adapters doctor: {about}.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 0 when at least one host can be used, otherwise 1."""
    diagnosis = diagnose(installed_versions(), interrupted_builds())
    print(render(diagnosis, devices()))
    return 0 if diagnosis.ready else 1


def _core_problems(versions: Versions) -> tuple[str, ...]:
    problems = []
    python = versions.get("python")
    if python is not None and _release(python) < (3, 10):
        problems.append(f"Python {python} is too old: tf-adapters needs 3.10 or newer")
    for package, oldest in _CORE.items():
        version = versions.get(package)
        if version is None:
            problems.append(f'{package} is not installed: pip install "{package}>={oldest}"')
        elif _release(version) < _release(oldest):
            problems.append(f'{package} {version} is too old: pip install --upgrade "{package}>={oldest}"')
    return tuple(problems)


def _check_host(host: SupportedHost, version: str | None) -> HostCheck:
    tested = f"{host.oldest} to {host.newest} tested" if host.oldest != host.newest else f"{host.newest} tested"
    if version is None:
        return HostCheck(host.name, False, "not installed", remedy=f'pip install "{host.install}"')
    if _release(version) < _release(host.oldest):
        remedy = f'pip install --upgrade "{host.package}>={host.oldest}"'
        return HostCheck(host.name, False, f"{version} is too old ({tested})", remedy=remedy)
    finding = f"{version}, in the tested range ({tested})"
    newest = _release(host.newest)
    if _release(version)[: len(newest)] > newest:  # as far as that names it: 2.13.1 is no newer than 2.13
        mend = f'pip install "{host.package}=={host.newest}"'
        finding = f"{version} is newer than what was tested ({tested}); if it fails: {mend}"
    return HostCheck(host.name, True, finding)


def _check_trainer(trainer: SupportedHost, version: str | None, hosts: Collection[str]) -> HostCheck:
    """As a host, but for nobody is one missing; it works where the host below it does."""
    check = _check_host(trainer, version)
    if version is None:
        return replace(check, remedy="")
    if check.usable and trainer.on not in hosts:
        return replace(check, usable=False, finding=f"{check.finding}; it needs {trainer.on}, see above")
    return check


def _closing_line(diagnosis: Diagnosis) -> str:
    if diagnosis.ready:
        return f"ready for: {', '.join(diagnosis.ready)}"
    if diagnosis.problems:
        return f"not ready: {diagnosis.problems[0]}"
    remedies = [host.remedy for host in diagnosis.hosts if host.remedy]
    return f"not ready: no host can be used; {' or '.join(remedies)}"


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros: ``0.19.8+cu12`` is (0, 19, 8)."""
    match = re.match(r"\d+(\.\d+)*", version.lstrip("v"))
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
