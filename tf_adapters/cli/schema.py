"""``tf-adapters schema``: a JSON Schema of the settings, with which editors complete and check a DeepSpeed config."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tf_adapters.config import RETIRED, SECTION, TimelyFreezeConfig
from tf_adapters.goals import LEVERS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = f'print a JSON Schema of the "{SECTION}" section of a DeepSpeed config, for editors'
    parser = subparsers.add_parser("schema", help=about, description=f"tf-adapters schema: {about}.")
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    print(json.dumps(config_schema(), indent=1))
    return 0


def config_schema() -> dict[str, Any]:
    """Return the schema of a DeepSpeed config. It describes our section only, and allows all other keys."""
    section = TimelyFreezeConfig.model_json_schema()
    for name, setting in section["properties"].items():
        setting.pop("title")
        setting.pop("allowed", None)  # words for error messages
        if name in LEVERS:
            setting.pop("default")
            setting["description"] += "; by default chosen by the goal"
    for name, advice in RETIRED.items():
        section["properties"][name] = {"deprecated": True, "description": f"ignored: {advice}"}
    section.update(title="Settings of tf-adapters", description="An empty object means the goal exact.")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config with tf-adapters",
        "type": "object",
        "properties": {SECTION: section},
    }
