"""``megatron.training.arguments.add_megatron_arguments``: adds all arguments of a Megatron-LM script.

Why here: every script's parser passes through it, whether ``pretrain`` parses (to 0.17.1) or the script does (from
0.18.1 on), and ``parse_args`` looks it up in its own module when it is called. Not covered: scripts with another
parser, which can call ``tf_adapters.arguments.add_arguments``.

Versions: run on Megatron-LM 0.16.1; read in 0.19.0 and main, the same name and argument.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

from megatron_patches.patch import Patch

PATCH = Patch("megatron.training.arguments", "add_megatron_arguments")
PATCHES = (PATCH,)


def apply(add: Callable[[ArgumentParser], Any]) -> None:
    """Call ``add`` with the parser after Megatron's arguments are in it."""

    def add_ours(run: Callable[[], ArgumentParser]) -> ArgumentParser:
        parser = run()
        add(parser)
        return parser

    PATCH.handle(add_ours)
