"""``deepspeed --module tf_adapters.deepspeed train.py ...``: run an unchanged script with freezing attached."""

from __future__ import annotations

import sys

from tf_adapters.hosts.launcher import check_script, run_script

_USAGE = "usage: deepspeed --module tf_adapters.deepspeed SCRIPT.py [its arguments]"
_LOCAL_RANK = ("--local_rank=", "--local-rank=")  # DeepSpeed's launcher, torch's older one


def main() -> None:
    """Run the script in the arguments as ``__main__``, with ``deepspeed.initialize`` replaced by ours."""
    script, arguments = split_arguments(sys.argv[1:])
    import deepspeed

    from tf_adapters.deepspeed.entry import attaching
    from tf_adapters.deepspeed.v_module import place_modules

    deepspeed.initialize = attaching(deepspeed.initialize)
    run_script("tf_adapters.deepspeed", script, arguments, prepare=lambda: place_modules(arguments))


def split_arguments(arguments: list[str]) -> tuple[str, list[str]]:
    """Return the script and its arguments. The launcher puts ``--local_rank=N`` before the script's name.

    Raises SystemExit with one line if the script is missing.
    """
    before = [index for index, text in enumerate(arguments) if not text.startswith(_LOCAL_RANK)]
    if not before:
        raise SystemExit(_USAGE)
    position = before[0]
    check_script("tf_adapters.deepspeed", arguments[position], _USAGE)
    return arguments[position], arguments[:position] + arguments[position + 1 :]


if __name__ == "__main__":
    main()
