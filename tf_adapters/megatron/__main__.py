"""``torchrun ... -m tf_adapters.megatron pretrain_gpt.py ...``: run an unchanged Megatron-LM script with freezing."""

from __future__ import annotations

import sys
from pathlib import Path

from tf_adapters.errors import TimelyFreezeError
from tf_adapters.hosts.launcher import run_script

_USAGE = "usage: torchrun [...] -m tf_adapters.megatron SCRIPT.py [its arguments] --timely-freeze [...]"


def main() -> None:
    """Run the script named first in the arguments as ``__main__``, with ``megatron.training`` patched."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        raise SystemExit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():  # before the host is imported, which takes seconds
        raise SystemExit(f"tf_adapters.megatron: no such script: {script}")
    sys.path[0] = str(script.resolve().parent)  # it may have megatron.training beside it

    from tf_adapters.megatron import install

    try:
        install()
    except TimelyFreezeError as error:
        raise SystemExit(f"tf_adapters.megatron: {error}") from None
    run_script("tf_adapters.megatron", arguments[0], arguments[1:])


if __name__ == "__main__":
    main()
