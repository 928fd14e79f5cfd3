"""``tf-adapters doctor``: show what is installed, which hosts can be used, and how to install what is missing.

Versions come from the packages' metadata: importing a host to ask for its version could start compilers or CUDA.
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

_CORE = {"torch": "2.5", "numpy": "1.26", "ortools": "9.10", "pydantic": "2.6", "scipy": "1.12"}
_EXTRAS = {"matplotlib": "Gantt charts", "rich": "coloured tables"}
_BUILD_S = 600.0  # a lock older than this was left by a build that was killed

Versions = Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class SupportedHost:
    """A host that has an adapter, and the oldest and newest version with which the adapter's tests pass.

    ``on`` is the name of the host that a trainer runs on.
    """

    name: str
    package: str
    oldest: str
    newest: str
    on: str = ""


HOSTS = (
    SupportedHost("deepspeed", "deepspeed", "0.19.3", "0.19.8"),
    SupportedHost("megatron-core", "megatron-core", "0.16.1", "0.19.2"),
    SupportedHost("torch.distributed.pipelining", "torch", "2.13", "2.15"),
    SupportedHost("torchtitan", "torchtitan", "0.2.2", "0.3.0"),
)
TRAINERS = (
    SupportedHost("Megatron-Bridge", "megatron-bridge", "0.3.1", "0.3.1", on="megatron-core"),
    SupportedHost("ms-swift", "ms-swift", "4.6.0", "4.6.0", on="megatron-core"),
    SupportedHost("slime", "slime", "0.3.1", "0.3.1", on="megatron-core"),
    SupportedHost("NeMo AutoModel", "nemo-automodel", "0.7.0", "0.7.0", on="torch.distributed.pipelining"),
)
"""Trainers with their own adapter or callback."""
_PACKAGES = tuple(dict.fromkeys((*_CORE, *(host.package for host in (*HOSTS, *TRAINERS)), *_EXTRAS)))


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The state of one host. ``remedy`` is a command line, or empty."""

    name: str
    usable: bool
    finding: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of ``diagnose``. With ``problems`` no host works; ``hints`` are about optional packages."""

    versions: dict[str, str | None]
    hosts: tuple[HostCheck, ...]
    trainers: tuple[HostCheck, ...]
    problems: tuple[str, ...]
    hints: tuple[str, ...]

    @property
    def ready(self) -> tuple[str, ...]:
        """The hosts and trainers that can be used."""
        return () if self.problems else tuple(one.name for one in (*self.hosts, *self.trainers) if one.usable)


def installed_versions() -> dict[str, str | None]:
    """Versions of Python and of each package that matters here; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("tf-adapters", *_PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def interrupted_builds(root: Path) -> tuple[Path, ...]:
    """Return the locks that killed builds of torch extensions left in ``root``. Later builds wait for them forever."""
    locks = [path for path in root.rglob("lock") if path.is_file()]
    return tuple(sorted(path for path in locks if time.time() - path.stat().st_mtime > _BUILD_S))


def diagnose(versions: Versions, locks: Sequence[Path] = ()) -> Diagnosis:
    """Judge the result of ``installed_versions``, and of ``interrupted_builds``. A missing key is not installed."""
    hints = tuple(
        f"no {package}, so no {use}: pip install {package}"
        for package, use in _EXTRAS.items()
        if versions.get(package) is None
    )
    hosts = tuple(_check_host(host, versions.get(host.package)) for host in HOSTS)
    usable = {host.name for host in hosts if host.usable}
    trainers = tuple(_check_trainer(trainer, versions.get(trainer.package), usable) for trainer in TRAINERS)
    killed = (
        f"a build of {lock.parent.name} was killed, and training would wait for it forever: rm {lock}" for lock in locks
    )
    problems = (*_core_problems(versions), *killed)
    return Diagnosis(dict(versions), hosts, trainers=trainers, problems=problems, hints=hints)


def devices() -> str:
    """Return one line on the accelerators that torch sees."""
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
    extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    diagnosis = diagnose(installed_versions(), interrupted_builds(extensions))
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
        return HostCheck(host.name, False, "not installed", remedy=f'pip install "{host.package}>={host.oldest}"')
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
    """Check a trainer. It needs the host below it. A missing trainer has no remedy: most users need none."""
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
