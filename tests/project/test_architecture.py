"""The rooms of docs/architecture.md, held by reading the imports: no arrow upward, no circle, no host elsewhere."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = [
    {"errors", "goals", "log", "megatron_patches"},
    {"gloo", "schemas"},
    {"config", "collectives", "overrides", "schedule", "values"},
    {"arguments", "measuring"},
    {"planner", "selection"},
    {"weight_gradients"},
    {"training"},
    {"report"},
    {"simulate"},
    {"advice"},
    {"hosts"},
    {"deepspeed", "megatron", "torch_pipelining"},
    {"trainers"},
    {"cli", "testing"},
]
"""From the ground up: a room imports rooms of lower floors only."""

HOSTS = {
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "torch_pipelining": "torch.distributed.pipelining",
    "trainers.automodel": "nemo_automodel",
    "trainers.bridge": "megatron.bridge",
    "trainers.slime": "slime",
    "trainers.swift": "swift",
    "trainers.torchtitan": "torchtitan",
}
"""By room or, among trainers, by module."""
MOST_LINES, MOST_FUNCTION_LINES, MOST_POSITIONAL = 400, 60, 4
MOVED = {
    "tf_adapters.megatron.bridge": "tf_adapters.trainers.bridge",
    "tf_adapters.megatron.slime": "tf_adapters.trainers.slime",
    "tf_adapters.megatron.swift": "tf_adapters.trainers.swift",
    "tf_adapters.torch_pipelining.automodel": "tf_adapters.trainers.automodel",
    "tf_adapters.torchtitan": "tf_adapters.trainers.torchtitan",
}
"""Old paths in users' scripts, and the module that each imports."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


ALL_FILES = [*sorted((ROOT / "tf_adapters").rglob("*.py")), *sorted((ROOT / "megatron_patches").glob("*.py"))]
FILES = [path for path in ALL_FILES if module_of(path) not in MOVED]


def room_of(module: str) -> str:
    """``tf_adapters.planner.glop`` is in ``planner``; ``tf_adapters`` alone is in no room."""
    parts = module.split(".")
    return parts[0] if parts[0] == "megatron_patches" else parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions; those for type checkers only do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def ours(path: Path) -> set[str]:
    return {
        name
        for name in imports(path)
        if name.split(".")[0] in ("tf_adapters", "megatron_patches") and room_of(name) != room_of(module_of(path))
    }


def floor_of(room: str) -> int:
    return next(floor for floor, rooms in enumerate(FLOORS) if room in rooms)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_room_imports_lower_rooms_only(path: Path) -> None:
    if path == ROOT / "tf_adapters" / "__init__.py":  # the public names: of every room, when they are asked for
        return
    here = room_of(module_of(path))
    allowed = {room for rooms in FLOORS[: floor_of(here)] for room in rooms} | {"__version__"}
    assert {room_of(name) for name in ours(path)} - allowed == set()


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_host_is_imported_in_its_own_folder_only(path: Path) -> None:
    here = module_of(path).removeprefix("tf_adapters.")
    if room_of(module_of(path)) in ("testing", "megatron_patches"):  # stand-ins for a host's own modules
        return
    for room, host in HOSTS.items():
        if not f"{here}.".startswith(f"{room}."):
            assert not [name for name in imports(path) if f"{name}.".startswith(f"{host}.")]


@pytest.mark.parametrize("room", ["schedule", "planner"])
def test_the_planner_imports_no_torch(room: str) -> None:
    for path in sorted((ROOT / "tf_adapters" / room).glob("*.py")):
        assert not [name for name in imports(path) if name.split(".")[0] in ("torch", *HOSTS)]


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_only_imports_the_new_one(old: str) -> None:
    _docstring, *body = ast.parse(ROOT.joinpath(*old.split(".")).with_suffix(".py").read_text()).body
    imported = [node for node in body if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imported} == {MOVED[old]}
    assert [ast.unparse(node) for node in body if node not in imported] in (
        [],
        ["if __name__ == '__main__':\n    main()"],
    )


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_command_lines_are_parsed_where_commands_are(path: Path) -> None:
    if room_of(module_of(path)) not in ("arguments", "cli", "megatron_patches", "testing", "trainers"):
        assert not [name for name in imports(path) if name.split(".")[0] == "argparse"]


def test_no_test_module_imports_another() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert not [name for name in imports(path) if name.startswith(("test_", "fault_"))], path


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_what_scripts_import_from_the_package_exists(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tf_adapters"):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), f"{path}: {name.name}"


PER_HOST = {"hosts", "deepspeed", "megatron", "torch_pipelining"}
"""Rooms in which an equal name means the equal part of another host."""


def test_a_name_means_one_thing_in_all_rooms() -> None:
    """Files and public classes of different rooms have different names; a command is named as it is typed."""
    homes: dict[str, set[str]] = {}
    for path in FILES:
        room = room_of(module_of(path))
        classes = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
        names = {node.name for node in classes if not node.name.startswith("_")}
        if not path.stem.startswith("__") and room not in ("cli", "megatron_patches"):
            names.add(path.name)
        for name in names:
            homes.setdefault(name, set()).add("hosts" if room in PER_HOST else room)
    assert {name: rooms for name, rooms in homes.items() if len(rooms) > 1} == {}


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    modules = {module_of(path): path for path in FILES}
    arrows = {
        name: {
            target
            for imported in imports(path)
            for target in (imported, imported.rpartition(".")[0])
            if target in modules and target != name and not name.startswith(f"{target}.")
        }
        for name, path in modules.items()
    }
    while leaves := {name for name, targets in arrows.items() if not targets & arrows.keys()}:
        arrows = {name: targets for name, targets in arrows.items() if name not in leaves}
    assert not arrows


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_and_functions_are_small_and_calls_name_their_arguments(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < MOST_FUNCTION_LINES, node.name
        if isinstance(node, ast.Call):
            positional = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            assert len(positional) <= MOST_POSITIONAL, f"line {node.lineno}"
