"""``torchrun ... -m tf_adapters.megatron pretrain_gpt.py ...``: run an unchanged Megatron-LM script with freezing."""

from __future__ import annotations

import sys

from tf_adapters.hosts.launcher import check_script, run_script
from tf_adapters.megatron import install

_USAGE = "usage: torchrun [...] -m tf_adapters.megatron SCRIPT.py [its arguments] --timely-freeze [...]"


def main() -> None:
    """Run the script in the first argument as ``__main__``, with ``megatron.training`` patched."""
    if len(sys.argv) < 2:
        print(_USAGE)
        raise SystemExit(2)
    check_script("tf_adapters.megatron", sys.argv[1], _USAGE)
    run_script("tf_adapters.megatron", sys.argv[1], sys.argv[2:], prepare=install)


if __name__ == "__main__":
    main()
