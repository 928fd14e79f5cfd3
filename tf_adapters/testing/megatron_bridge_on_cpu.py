"""Run an unedited Megatron-Bridge script without a GPU, to try it before a real run::

    torchrun --nproc-per-node 2 -m tf_adapters.testing.megatron_bridge_on_cpu train.py

``megatron_on_cpu`` prepares Megatron-Core. This module provides packages that Megatron-Bridge always imports, and
replaces functions that need a GPU. Give the model provider ``transformer_layer_spec=local_layer_spec`` and no fused
kernels, and the configuration ``dist.distributed_backend = "gloo"``.
Run with Megatron-Bridge 0.3.1 (Megatron-Core 0.16.1).
"""

from __future__ import annotations

import builtins
import types
from typing import Any

from tf_adapters.testing import megatron_on_cpu
from tf_adapters.testing.after_import import accept_device_ids, run_prepared

_ABSENT = {
    "megatron.bridge": ("modelopt", "nvidia_resiliency_ext", "transformer_engine", "triton"),
    "megatron.core.inference": ("triton",),
    "megatron.core.ssm": ("triton",),
}
"""The packages that a module can import although they are not installed, by the module's name. Other modules do not see
them, because they choose their code by whether a package is installed."""


class _Shown(types.ModuleType):
    """An absent package: every name in it exists, as an empty class or as a callable module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        shown = _Shown(f"{self.__name__}.{name}") if name[0].islower() else type(name, (), {})
        setattr(self, name, shown)
        return shown

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator it returns the function; otherwise it does nothing."""
        return args[0] if args and callable(args[0]) else None


def install() -> None:
    """Prepare this process for Megatron-Bridge, before it is imported; once is enough."""
    if hasattr(builtins.__import__, "timely_freeze"):
        return
    megatron_on_cpu.install()
    megatron_on_cpu.use_built_helpers()
    megatron_on_cpu.spawn_without_the_script()
    accept_device_ids()
    _show_absent_packages()


def _show_absent_packages() -> None:
    run: Any = builtins.__import__
    shown: dict[str, _Shown] = {}

    def import_or_show(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        root = name.partition(".")[0]
        importer = (globals or {}).get("__name__", "")
        if level or not any(importer.startswith(who) and root in roots for who, roots in _ABSENT.items()):
            return run(name, globals, locals, fromlist=fromlist, level=level)
        try:
            return run(name, globals, locals, fromlist=fromlist, level=level)
        except ImportError:
            module = shown.setdefault(root, _Shown(root))
        for part in name.split(".")[1:] if fromlist else ():
            module = getattr(module, part)
        return module

    import_or_show.timely_freeze = True  # type: ignore[attr-defined]
    vars(builtins)["__import__"] = import_or_show


if __name__ == "__main__":
    run_prepared(install, __doc__)
