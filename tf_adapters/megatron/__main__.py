"""``torchrun ... -m tf_adapters.megatron pretrain_gpt.py ...``: run an unchanged Megatron-LM script with freezing."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_USAGE = "usage: torchrun [...] -m tf_adapters.megatron SCRIPT.py [its arguments] --timely-freeze [...]"


def main() -> None:
    """Run the script named first in the arguments as ``__main__``, with ``megatron.training`` patched."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():
        raise SystemExit(f"tf_adapters.megatron: no such script: {script}")
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)  # it imports its neighbours, megatron.training among them

    from tf_adapters.errors import TimelyFreezeError
    from tf_adapters.megatron import install

    try:
        install()
    except TimelyFreezeError as error:
        raise SystemExit(f"tf_adapters.megatron: {error}") from None
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
