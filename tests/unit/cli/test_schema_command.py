"""``tf-adapters schema``: the schema and the settings themselves give the same verdict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tf_adapters.cli import main
from tf_adapters.cli.schema import config_schema
from tf_adapters.config import RETIRED, TimelyFreezeConfig
from tf_adapters.errors import ConfigError
from tf_adapters.goals import LEVERS

SECTION = config_schema()["properties"]["timely_freeze"]
KINDS = {"array": list, "boolean": bool, "integer": int, "null": type(None), "number": (int, float), "object": dict}
KINDS["string"] = str
LIMITS = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "enum": lambda value, allowed: value in allowed,
    "const": lambda value, allowed: value == allowed,
}
WORDS = {"$schema", "title", "description", "default", "deprecated"}
"""Keywords that say nothing about what is allowed."""


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Judge a value by the keywords of JSON Schema that our schema uses. Other keywords raise KeyError."""
    if "anyOf" in schema:
        return any(accepts(choice, value) for choice in schema["anyOf"])
    if "type" not in schema:
        return True
    if not isinstance(value, KINDS[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    limits = schema.keys() - WORDS - {"type", "items", "properties", "additionalProperties"}
    if not all(LIMITS[name](value, schema[name]) for name in limits):
        return False
    if isinstance(value, list):
        return all(accepts(schema["items"], item) for item in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        return all(
            accepts(known[k], v) if k in known else others is not False and accepts(others, v) for k, v in value.items()
        )
    return True


VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 50, 10**9, 10**10, 10**19, -0.5, 0.5, 1.5, 1e7, 1e10),
    *("", "auto", "exact", "pays", "paper", "timely", "timely+apf", "apf", "none", "tensor", "token", "block"),
    *("in_place", "deferred", "skipped_as_zero", "computed_mean", "mixed", "halves", "host", "v", "1f1b", "gpipe"),
    *("warn", "raise", "0.5", [], ["*.bias"], [1], {}, {"*norm*": 0.5}, {"*norm*": 1.5}, {"*norm*": "much"}),
)
BESIDE = ({}, {"weight_gradients": "deferred", "extra_microbatches": "auto"}, {"goal": "paper"})
"""Settings of which one lets each value of another setting be allowed."""


def allowed(section: dict[str, Any]) -> bool:
    try:
        TimelyFreezeConfig.parse(section)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", [*TimelyFreezeConfig.model_fields, *RETIRED, "max_freze_ratio", "optimizer_step"])
def test_the_schema_allows_what_the_settings_allow(name: str) -> None:
    for value in VALUES:
        expected = any(allowed({**beside, name: value}) for beside in BESIDE)
        assert accepts(SECTION, {name: value}) == expected, f"{name}: {value!r}"


def test_an_editor_shows_what_each_setting_means_and_its_default() -> None:
    for name, field in TimelyFreezeConfig.model_fields.items():
        shown = SECTION["properties"][name]
        assert shown["description"].startswith(str(field.description))
        assert "default" not in shown if name in LEVERS else shown["default"] == field.default


def test_other_keys_of_the_config_are_free(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == config_schema()
    assert accepts(schema, {"train_batch_size": 8, "timely_freeze": {"goal": "paper"}})
    assert not accepts(schema, {"timely_freeze": {"goal": "fast"}})
    assert not accepts(schema, {"timely_freeze": []})
