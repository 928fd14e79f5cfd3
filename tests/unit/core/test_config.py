import re

import pytest

from tf_adapters.config import REMOVED, RETIRED, TimelyFreezeConfig, _say_retired, allowed, find_section
from tf_adapters.errors import ConfigError


def test_defaults():
    config = TimelyFreezeConfig.parse({})
    assert config.enabled
    assert config.goal == "exact"
    assert config.method == "timely"
    assert config.warmup_steps == "auto"


def test_every_field_is_read():
    section = {
        "enabled": False,
        "goal": "paper",
        "method": "none",
        "max_freeze_ratio": 0.5,
        "target_speedup": 1.25,
        "freeze_exclude": ["*.bias", "embed*"],
        "freeze_limits": {"*norm*": 0.0, "*lora_*": 0.5},
        "granularity": "tensor",
        "weight_gradients": "deferred",
        "extra_microbatches": "auto",
        "memory_limit": 60.5,
        "gradient_scale": "computed_mean",
        "warmup_steps": 3,
        "monitoring": "halves",
        "monitoring_steps": 10,
        "monitoring_precision": 0.05,
        "progressive_steps": 0,
        "stability_check_interval": 20,
        "apf_threshold": 0.05,
        "autofreeze_percentile": 50,
        "seed": 7,
        "placement": "v",
        "schedule": "gpipe",
        "on_error": "raise",
        "replan_threshold": 0.25,
        "replan_interval": 20,
        "solver_time_limit_s": 5,
        "output_dir": "runs",
        "nvtx": True,
    }
    assert TimelyFreezeConfig.parse(section).model_dump() == section


class ManyLines:
    """Shown as an optimizer shows itself."""

    def __repr__(self) -> str:
        return "Many lines\n    of an optimizer\n" * 20


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"goal": "fast"}, ["timely_freeze.goal is 'fast'", 'allowed is "exact", "paper", or null']),
        ({"goal": ["exact"]}, ["timely_freeze.goal is ['exact']"]),
        ({"max_freeze_ratio": 1.5}, ["timely_freeze.max_freeze_ratio is 1.5", "a number from 0 to 1"]),
        ({"max_freeze_ratio": "0.8"}, ["max_freeze_ratio is '0.8'", "a number from 0 to 1"]),
        ({"max_freeze_ratio": float("nan")}, ["max_freeze_ratio is nan"]),
        ({"target_speedup": 0.9}, ["target_speedup is 0.9", "a number from 1 to 1,000,000,000, or null"]),
        ({"freeze_exclude": "*.bias"}, ["freeze_exclude is '*.bias'", "a list of names"]),
        ({"freeze_limits": ["*.bias"]}, ["freeze_limits is ['*.bias']", "an object of patterns and ratios from 0 to"]),
        ({"freeze_limits": {"a*": 0.1, "b*": 1.5}}, ['timely_freeze.freeze_limits["b*"] is 1.5', "ratios from 0 to"]),
        ({"freeze_limits": {"a*": "half"}}, ["freeze_limits[\"a*\"] is 'half'", "ratios from 0 to"]),
        ({"goal": "exact", "freeze_limits": {"a*": 0.5}}, ['which is 0.0 with goal "exact"']),
        ({"freeze_limits": {"a*": float("nan")}}, ['freeze_limits["a*"] is nan']),
        (
            {"freeze_limits": {"a*": 0.5, "b*": 0.7}, "max_freeze_ratio": 0.6},
            [
                'timely_freeze.freeze_limits["b*"] is 0.7',
                "a number from 0 to timely_freeze.max_freeze_ratio, which is 0.6",
            ],
        ),
        ({"granularity": "row"}, ["timely_freeze.granularity is 'row': allowed is \"tensor\""]),
        ({"warmup_steps": -1}, ["warmup_steps is -1", '"auto" or an integer from 0 to 1,000,000,000']),
        ({"warmup_steps": "ten"}, ["warmup_steps is 'ten'", '"auto"']),
        ({"warmup_steps": True}, ["warmup_steps is True"]),
        ({"monitoring_steps": 1}, ["monitoring_steps is 1", "from 2"]),
        ({"monitoring_steps": 2.5}, ["monitoring_steps is 2.5"]),
        ({"monitoring_precision": 0}, ["monitoring_precision is 0", "a number above 0, up to 1"]),
        ({"output_dir": 1}, ["output_dir is 1", "a path"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"memory_limit": 0}, ["memory_limit is 0", "a number above 0, up to 1,000,000, or null"]),
        ({"memory_limit": "60GB"}, ["memory_limit is '60GB'", "a number above 0, up to 1,000,000, or null"]),
        (
            {"memory_limit": 60, "extra_microbatches": 4, "weight_gradients": "deferred"},
            ["timely_freeze.memory_limit is 60 and timely_freeze.extra_microbatches is 4", 'extra_microbatches "auto"'],
        ),
        (
            {"extra_microbatches": "all"},
            ["extra_microbatches is 'all'", '"auto" or an integer from -1,000,000,000 to 1,000,000,000'],
        ),
        ({"enabled": "yes"}, ["enabled is 'yes'", "true or false"]),
        ({"method": "apf2"}, ["method is 'apf2'", '"timely", "timely+apf", "timely+autofreeze", "apf", "auto']),
        ({"apf_threshold": -0.1}, ["apf_threshold is -0.1", "a number from 0 to 1"]),
        ({"autofreeze_percentile": 101}, ["autofreeze_percentile is 101", "a number from 0 to 100"]),
        ({"stability_check_interval": 0}, ["stability_check_interval is 0", "an integer from 1 to 1,000,000,000"]),
        ({"stability_check_interval": 2.0}, ["stability_check_interval is 2.0"]),
        ({"max_freze_ratio": 0.5}, ['unknown key "max_freze_ratio"', 'did you mean "max_freeze_ratio"?']),
        ({"colour": 1}, ['unknown key "colour"', "allowed are enabled, goal, method"]),
        ({"train_batch_size": 8, "fp16": {}}, ['unknown key "train_batch_size", "fp16": allowed are enabled, goal']),
        ({"train_batch_size": 8, "timely_freeze": {}}, ['a whole config: pass only its section "timely_freeze"']),
        (ManyLines(), ["Many lines of an optimizer", "must be an object of settings"]),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_field_value_and_what_is_allowed(section, words):
    with pytest.raises(ConfigError) as caught:
        TimelyFreezeConfig.parse(section)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_step_time_ms", 100.0),
        ("apf_alpha", 0.9),
        ("apf_score", "elements"),
        ("plan_wait", True),
        ("report_every", 10),
    ],
)
def test_a_retired_setting_is_ignored_and_one_line_says_what_to_do(name, value, caplog):
    _say_retired.cache_clear()
    for _ in range(2):
        assert TimelyFreezeConfig.parse({name: value, "seed": 7}) == TimelyFreezeConfig(seed=7)
    (line,) = caplog.messages
    assert line == f"timely_freeze: timely_freeze.{name} is no setting any more and is ignored: {RETIRED[name]}"


@pytest.mark.parametrize("value", ["synchronous", "post_validated"])
def test_a_removed_setting_is_refused_in_one_line(value):
    line = f"timely_freeze.optimizer_step is retired: {REMOVED['optimizer_step']}"
    for read in (TimelyFreezeConfig.parse, lambda section: TimelyFreezeConfig(**section)):
        with pytest.raises(ConfigError) as caught:
            read({"optimizer_step": value, "weight_gradients": "deferred"})
        assert str(caught.value) == line


@pytest.mark.parametrize(("value", "ratio"), [(False, 0.0), ("false", 0.0), (True, 0.5)])
def test_a_run_that_was_to_freeze_nothing_still_freezes_nothing(value, ratio):
    section = {"method": "none", "max_freeze_ratio": 0.5, "monitoring_masks": value}
    assert TimelyFreezeConfig.parse(section) == TimelyFreezeConfig(method="none", max_freeze_ratio=ratio)


NUMBERS = [name for name in TimelyFreezeConfig.model_fields if re.search(r"\b(number|integer)\b", allowed(name))]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30, 10**400], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_without_an_end(name, value):
    """An infinite or huge one would end a solver or a process much later, or make a report that is no JSON."""
    with pytest.raises(ConfigError, match=rf"^timely_freeze\.{name} is (inf|nan|1).*: allowed is ") as caught:
        TimelyFreezeConfig(**{name: value})
    assert "\n" not in str(caught.value)


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(ConfigError, match=r"monitoring_steps is 0.*; timely_freeze\.seed is -1"):
        TimelyFreezeConfig.parse({"seed": -1, "monitoring_steps": 0})


def test_a_section_that_is_no_object_is_refused():
    with pytest.raises(ConfigError, match="must be an object"):
        TimelyFreezeConfig.parse([1])  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["timelyfreeze", "timely-freeze", "TimelyFreeze", "timely_freez", "timly_freeze"])
def test_a_section_spelt_almost_right_is_noticed(key):
    with pytest.raises(ConfigError, match=f'"{key}".*did you mean "timely_freeze"'):
        find_section({"train_batch_size": 1, key: {}})


def test_other_sections_are_left_alone():
    keys = {"optimizer": {}, "zero_optimization": {}, "timers": {}, "timely_freeze": {"seed": 1}}
    assert find_section(keys) == {"seed": 1}
    assert find_section({"optimizer": {}}) is None


def test_python_settings_are_checked_as_the_json_ones():
    assert TimelyFreezeConfig(max_freeze_ratio=0.5) == TimelyFreezeConfig.parse({"max_freeze_ratio": 0.5})
    with pytest.raises(ConfigError, match="max_freeze_ratio is 2: allowed is a number from 0 to 1"):
        TimelyFreezeConfig(max_freeze_ratio=2)
    with pytest.raises(ConfigError, match='did you mean "seed"'):
        TimelyFreezeConfig(sed=1)


def test_settings_do_not_change_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        TimelyFreezeConfig().seed = 3


@pytest.mark.parametrize(
    ("method", "metric", "plans"),
    [
        ("timely", None, True),
        ("none", None, True),
        ("timely+apf", "apf", True),
        ("timely+autofreeze", "autofreeze", True),
        ("apf", "apf", False),
        ("autofreeze", "autofreeze", False),
    ],
)
def test_a_method_says_what_it_asks_and_whether_it_plans(method, metric, plans):
    config = TimelyFreezeConfig(method=method)
    assert (config.stability_metric, config.plans) == (metric, plans)


def test_a_limit_is_a_cap_on_how_often_something_is_frozen_where_all_else_is():
    limits = {"*embed*": 0.2, "*norm*": 0.0, "*lora_*": 0.4}
    planned = TimelyFreezeConfig(max_freeze_ratio=0.8, freeze_limits=limits)
    assert planned.freeze_caps == {"*embed*": 0.25, "*norm*": 0.0, "*lora_*": 0.5}
    assert TimelyFreezeConfig(max_freeze_ratio=0.4, freeze_limits={"*": 0.4}).freeze_caps == {"*": 1.0}
    assert TimelyFreezeConfig(max_freeze_ratio=0.0, freeze_limits={"*": 0.0}).freeze_caps == {"*": 0.0}


@pytest.mark.parametrize("method", ["apf", "autofreeze"])
def test_without_a_plan_a_limit_is_a_cap_itself_and_may_be_any_ratio(method):
    config = TimelyFreezeConfig(method=method, max_freeze_ratio=0.5, freeze_limits={"*embed*": 0.9})
    assert config.freeze_caps == {"*embed*": 0.9}
