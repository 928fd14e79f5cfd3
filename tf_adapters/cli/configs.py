"""``tf-adapters configs``: the ready DeepSpeed configs that come with the package, listed, printed or copied."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tf_adapters.errors import ConfigError

_FOLDER = Path(__file__).resolve().parents[2] / "deepspeed_configs"
"""Next to the package, in a checkout and in an installed wheel."""
_DESCRIPTION = """\
List the ready DeepSpeed configs, each with a "timely_freeze" section; with NAME print one; with --copy write it.
Exit status: 0, or 2 with one line for a wrong name or a file that cannot be written."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "configs",
        help="list, print or copy the ready DeepSpeed configs",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a name of the list, such as plain or paper/llama_3_8b")
    parser.add_argument("--copy", metavar="FILE", help="write the config here; a file that exists is not replaced")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.name is None:
        if args.copy is not None:
            raise ConfigError("--copy: give the NAME of the config to copy")
        print("\n".join(ready_configs()))
        return 0
    configs = ready_configs()
    wanted = args.name.removesuffix(".json")
    if wanted not in configs:
        raise ConfigError(f"NAME is {args.name!r}: allowed are {', '.join(configs)}")
    text = configs[wanted].read_text(encoding="utf-8")
    if args.copy is None:
        sys.stdout.write(text)
        return 0
    _write_new(Path(args.copy), text)
    print(f"{args.copy}: copied; start with deepspeed --module tf_adapters.deepspeed train.py --deepspeed_config FILE")
    return 0


def ready_configs() -> dict[str, Path]:
    """The files by name, sorted. A name is the path below the folder, without ``.json``."""
    files = sorted(_FOLDER.rglob("*.json"))
    return {file.relative_to(_FOLDER).as_posix().removesuffix(".json"): file for file in files}


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--copy: {path} exists; it is not replaced") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--copy: cannot write {str(path)!r}: {reason}") from None
