"""``torchrun ... -m tf_adapters.torchtitan ...``: an unchanged TorchTitan job with freezing."""

from __future__ import annotations

import functools
import inspect
import runpy
import sys
from typing import Any

from tf_adapters.errors import UnsupportedError
from tf_adapters.hosts.launcher import errors_in_one_line
from tf_adapters.torchtitan.settings import JobSettings

_USAGE = (
    "usage: torchrun [...] -m tf_adapters.torchtitan [-m MODULE] [TorchTitan's arguments] --timely_freeze.enable "
    "[--timely_freeze.max_freeze_ratio 0.8 ...]\nMODULE is torchtitan.train by default."
)


def main() -> None:
    """Run TorchTitan's training, or the module that ``-m`` names, as it would run by itself.

    An error of ours becomes one line on rank 0's stderr and exit status 2 on every rank.
    """
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        raise SystemExit(0)
    module = "torchtitan.train"
    if arguments[:1] == ["-m"] and len(arguments) > 1:
        module, arguments = arguments[1], arguments[2:]
    with errors_in_one_line("tf_adapters.torchtitan"):
        _run(module, arguments)


def _run(module: str, arguments: list[str]) -> None:
    settings = JobSettings(arguments)
    sys.argv = [module, *settings.rest]  # before TorchTitan is imported: it reads them then
    try:
        from torchtitan.config import ConfigManager

        from tf_adapters.torchtitan.training import install, trainer_module

        trainer = trainer_module()
    except ModuleNotFoundError as error:
        if error.name == "torchtitan":
            raise UnsupportedError("torchtitan is not installed: pip install torchtitan") from None
        raise UnsupportedError(
            f"torchtitan needs {error.name}, which is not installed (triton comes with PyTorch for GPUs; without one, "
            "start with -m tf_adapters.testing.torchtitan_on_cpu -m tf_adapters.torchtitan)"
        ) from None

    if hasattr(ConfigManager, "_maybe_load_toml"):  # before 0.3
        load = ConfigManager._maybe_load_toml

        @functools.wraps(load)
        def load_toml(self: Any, args: list[str]) -> Any:
            values = load(self, args)
            return values if values is None else settings.take_section(values)

        ConfigManager._maybe_load_toml = load_toml
    install(settings.config)
    if module != "torchtitan.train":
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    import torchtitan.train as script

    takes_trainer = bool(inspect.signature(script.main).parameters)
    script.main(*([trainer.Trainer] if takes_trainer else []))


if __name__ == "__main__":
    main()
