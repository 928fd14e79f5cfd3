"""Changes of modules at their import."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from tf_adapters.testing.after_import import ChangedImports, Run


def test_a_module_is_changed_when_it_is_imported_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "changed_package"
    folder.mkdir()
    for name in ("__init__", "one", "other"):
        (folder / f"{name}.py").write_text("value = 1\nseen = value\n")

    def change(run: Run, module: types.ModuleType) -> None:
        run(module)
        vars(module)["value"] = 2

    monkeypatch.syspath_prepend(tmp_path)
    finder = ChangedImports({"changed_package.one": change, "changed_package.absent": change}.get)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    one, other = (importlib.import_module(f"changed_package.{name}") for name in ("one", "other"))
    assert (one.seen, one.value, other.value) == (1, 2, 1)
    with pytest.raises(ModuleNotFoundError, match=r"changed_package\.absent"):
        importlib.import_module("changed_package.absent")
