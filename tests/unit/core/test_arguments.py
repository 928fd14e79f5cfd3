"""The settings as ``--timely-freeze*`` arguments of a host's own parser."""

from __future__ import annotations

import argparse

import pytest

from tf_adapters.arguments import add_arguments, config_from_args
from tf_adapters.config import REMOVED, RETIRED, TimelyFreezeConfig, allowed
from tf_adapters.errors import ConfigError
from tf_adapters.goals import LEVERS

FIELDS = [name for name in TimelyFreezeConfig.model_fields if name != "enabled"]
each_field = pytest.mark.parametrize("name", FIELDS)

GOOD = {
    "goal": [("paper", "paper"), ("exact", "exact")],
    "method": [(m, m) for m in ("none", "timely", "timely+apf", "timely+autofreeze", "apf", "autofreeze")],
    "max_freeze_ratio": [("0.25", 0.25), ("0", 0.0), ("1", 1.0), ("5e-1", 0.5)],
    "target_speedup": [("1.25", 1.25), ("2", 2.0)],
    "freeze_exclude": [("*.bias", ["*.bias"]), ("*.bias,embed*", ["*.bias", "embed*"])],
    "freeze_limits": [
        ("*embed*=0.2", {"*embed*": 0.2}),
        ("*embed*=0.2,*norm*=0", {"*embed*": 0.2, "*norm*": 0.0}),
        ("[a=]?=0.8", {"[a=]?": 0.8}),
    ],
    "granularity": [("tensor", "tensor")],
    "weight_gradients": [("in_place", "in_place"), ("deferred", "deferred")],
    "extra_microbatches": [("0", 0), ("4", 4), ("-4", -4), ("auto", "auto")],
    "memory_limit": [("60", 60.0), ("0.5", 0.5)],
    "gradient_scale": [("skipped_as_zero", "skipped_as_zero"), ("computed_mean", "computed_mean")],
    "warmup_steps": [("auto", "auto"), ("0", 0), ("300", 300)],
    "monitoring": [("mixed", "mixed"), ("halves", "halves")],
    "monitoring_steps": [("2", 2), ("80", 80)],
    "monitoring_precision": [("0.05", 0.05), ("1", 1.0), ("1e-3", 1e-3)],
    "progressive_steps": [("0", 0), ("7", 7)],
    "stability_check_interval": [("1", 1), ("200", 200)],
    "apf_threshold": [("0.0001", 0.0001), ("1e-4", 1e-4), ("0", 0.0)],
    "autofreeze_percentile": [("80", 80.0), ("33.5", 33.5)],
    "seed": [("0", 0), ("123456789012", 123456789012)],
    "placement": [("host", "host"), ("v", "v")],
    "schedule": [("host", "host"), ("1f1b", "1f1b"), ("gpipe", "gpipe")],
    "on_error": [("raise", "raise"), ("warn", "warn")],
    "replan_threshold": [("0.25", 0.25), ("0", 0.0)],
    "replan_interval": [("1", 1), ("20", 20)],
    "solver_time_limit_s": [("2.5", 2.5), ("10", 10.0)],
    "output_dir": [("runs/a b", "runs/a b"), ("2024", "2024"), ("0.5", "0.5")],
    "nvtx": [("true", True), ("false", False)],
}
NEEDS = {
    "extra_microbatches": {"weight_gradients": "deferred"},
    "memory_limit": {"weight_gradients": "deferred", "extra_microbatches": "auto"},
}
"""What another setting has to be for some value of a setting to be allowed."""
BAD = {
    "goal": ["fast", "Exact", "0", ""],
    "method": ["APF", "apf+timely", "timely+", "Timely", "1", ""],
    "max_freeze_ratio": ["1.5", "-0.5", "-1", "nan", "inf", "much", "80%", ""],
    "target_speedup": ["0.9", "fast", "nan"],
    "freeze_limits": [
        "*embed*",
        "0.2",
        "*embed*=",
        "*embed*=much",
        "*embed*=1.5",
        "*embed*=-0.1",
        "a=0.1,",
        "a=0.1,b",
        "a=nan",
    ],
    "granularity": ["row", "1", ""],
    "weight_gradients": ["later", "True", ""],
    "extra_microbatches": ["-1.5", "1.5", "all"],
    "memory_limit": ["0", "-1", "nan", "60GB"],
    "gradient_scale": ["inverse", "mean", "0.5"],
    "warmup_steps": ["-1", "2.5", "automatic", "None", ""],
    "monitoring": ["Mixed", "paper", "0.5"],
    "monitoring_steps": ["1", "-4", "2.0", "many"],
    "monitoring_precision": ["0", "-0.1", "1.1", "nan", "2%"],
    "progressive_steps": ["-1", "0.5", "auto"],
    "stability_check_interval": ["0", "-1", "1.5", "auto"],
    "apf_threshold": ["-0.1", "1.1", "nan", "small"],
    "autofreeze_percentile": ["-1", "101", "80%", "nan"],
    "seed": ["-1", "1.0", "x"],
    "placement": ["V", "zbv", "0"],
    "schedule": ["GPipe", "zb", "0"],
    "on_error": ["ignore", "True"],
    "replan_threshold": ["-0.1", "nan", "never"],
    "replan_interval": ["0", "-1", "1.5"],
    "solver_time_limit_s": ["0", "-1", "nan", "long"],
    "nvtx": ["1", "yes", "True"],
}


def option(name: str) -> str:
    return f"--timely-freeze-{name.replace('_', '-')}"


def host_parser(**settings: object) -> argparse.ArgumentParser:
    """A parser with arguments of its own, as Megatron-LM makes it."""
    parser = argparse.ArgumentParser(prog="pretrain.py", allow_abbrev=False, **settings)  # type: ignore[arg-type]
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1234)
    return parser


def parse(*arguments: str) -> argparse.Namespace:
    return add_arguments(host_parser()).parse_args(arguments)


# --- the group -------------------------------------------------------------------------------------------------


def test_every_field_has_an_argument_and_no_other_has() -> None:
    group = next(g for g in add_arguments(host_parser())._action_groups if g.title == "timely freeze")
    options = {action.option_strings[0]: action.dest for action in group._group_actions}
    assert options == {"--timely-freeze": "timely_freeze", **{option(name): f"timely_freeze_{name}" for name in FIELDS}}


@each_field
def test_defaults_are_the_models(name: str) -> None:
    default = vars(parse())[f"timely_freeze_{name}"]
    expected = None if name in LEVERS else TimelyFreezeConfig.model_fields[name].default
    assert default == expected
    assert type(default) is type(expected)


@each_field
def test_the_help_says_what_the_setting_is_may_be_and_is_by_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # one line for each text
    shown = add_arguments(host_parser()).format_help().split(f"  {option(name)} ")[1].splitlines()[1].strip()
    field = TimelyFreezeConfig.model_fields[name]
    assert (
        shown
        == f"{field.description}; allowed: {allowed(name)} (default: {'by goal' if name in LEVERS else field.default})"
    )


def test_the_hosts_arguments_stay_as_they_were() -> None:
    args = parse("--num-layers", "8", "--timely-freeze", "--timely-freeze-seed", "5")
    assert (args.num_layers, args.seed, args.timely_freeze_seed) == (8, 1234, 5)
    assert vars(parse()).keys() - vars(host_parser().parse_args([])).keys() == {
        "timely_freeze",
        *(f"timely_freeze_{name}" for name in FIELDS),
    }


def test_adding_twice_is_adding_once() -> None:
    parser = host_parser()
    assert add_arguments(parser) is parser
    before = list(parser._actions)
    assert add_arguments(parser) is parser
    assert parser._actions == before
    assert [group.title for group in parser._action_groups].count("timely freeze") == 1


@pytest.mark.parametrize("allow_abbrev", [False, True])
def test_the_switch_is_not_taken_for_one_of_the_settings(allow_abbrev: bool) -> None:
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=allow_abbrev))
    args = parser.parse_args(["--timely-freeze", "--timely-freeze-method", "none"])
    assert config_from_args(args) == TimelyFreezeConfig(method="none")


def test_a_shortened_setting_is_unknown_where_the_host_forbids_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--timely-freeze", "--timely-freeze-max", "0.5")
    assert "unrecognized arguments: --timely-freeze-max" in capsys.readouterr().err


def test_a_host_that_ignores_what_it_does_not_know_still_gets_ours() -> None:
    args, unknown = add_arguments(host_parser()).parse_known_args(["--colour", "1", "--timely-freeze"])
    assert unknown == ["--colour", "1"]
    assert config_from_args(args) == TimelyFreezeConfig()


# --- values ----------------------------------------------------------------------------------------------------


def test_every_field_has_values_here() -> None:
    assert list(GOOD) == FIELDS
    assert set(FIELDS) - set(BAD) == {"output_dir", "freeze_exclude"}


@pytest.mark.parametrize(("name", "text", "value"), [(name, *pair) for name, pairs in GOOD.items() for pair in pairs])
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_a_good_value_is_read(name: str, text: str, value: object, form: str) -> None:
    given = [option(name), text] if form == "two words" else [f"{option(name)}={text}"]
    others = NEEDS.get(name, {})
    needed = [f"{option(other)}={needs}" for other, needs in others.items()]
    config = config_from_args(parse("--timely-freeze", *given, *needed))
    assert config == TimelyFreezeConfig(**{name: value, **others})
    assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_bad_value_ends_the_program_with_one_line(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--timely-freeze", f"{option(name)}={text}")
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err == f"pretrain.py: error: {option(name)} is {text!r}: allowed is {allowed(name)}\n"
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["-1", "-0.5"])
def test_a_negative_number_as_a_word_of_its_own_is_a_bad_value_too(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--timely-freeze-max-freeze-ratio", text)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_all_settings_at_once() -> None:
    chosen = {name: pairs[0] for name, pairs in GOOD.items() if name != "memory_limit"}  # not with a number of them
    given = [word for name, (text, _) in chosen.items() for word in (option(name), text)]
    config = config_from_args(parse("--timely-freeze", *given))
    assert config == TimelyFreezeConfig(**{name: value for name, (_, value) in chosen.items()})


@pytest.mark.parametrize("limit_first", [True, False])
def test_limits_are_compared_with_the_ratio_that_is_given_wherever_it_stands(
    limit_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    limits, ratio = ["--timely-freeze-freeze-limits", "*norm*=0.9"], ["--timely-freeze-max-freeze-ratio", "0.95"]
    config = config_from_args(parse("--timely-freeze", *(limits + ratio if limit_first else ratio + limits)))
    assert config == TimelyFreezeConfig(max_freeze_ratio=0.95, freeze_limits={"*norm*": 0.9})
    with pytest.raises(SystemExit) as caught:
        parse("--timely-freeze", *limits)
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        'pretrain.py: error: timely_freeze.freeze_limits["*norm*"] is 0.9: '
        "allowed is a number from 0 to timely_freeze.max_freeze_ratio, which is 0.8\n"
    )


def test_an_argument_of_version_2_is_taken_and_not_shown() -> None:
    old = [word for name in RETIRED for word in (option(name), "false")]
    assert config_from_args(parse("--timely-freeze", *old)) == TimelyFreezeConfig(max_freeze_ratio=0.0)
    assert config_from_args(parse(*old)) is None
    shown = add_arguments(host_parser()).format_help()
    assert not any(option(name) in shown for name in (*RETIRED, *REMOVED))


@pytest.mark.parametrize("value", ["synchronous", "post_validated"])
@pytest.mark.parametrize("switch", [["--timely-freeze"], []])
def test_a_removed_argument_ends_the_program_with_the_line_of_its_setting(
    switch: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*switch, "--timely-freeze-optimizer-step", value)
    assert caught.value.code == 2
    line = f"timely_freeze.optimizer_step is retired: {REMOVED['optimizer_step']}"
    assert capsys.readouterr().err == f"pretrain.py: error: {line}\n"


def test_the_last_of_two_values_counts() -> None:
    args = parse("--timely-freeze", "--timely-freeze-seed", "1", "--timely-freeze-seed", "2")
    assert config_from_args(args) == TimelyFreezeConfig(seed=2)


# --- on or off -------------------------------------------------------------------------------------------------


def test_the_switch_alone_is_all_defaults() -> None:
    assert config_from_args(parse("--timely-freeze")) == TimelyFreezeConfig()


def test_nothing_given_is_no_freezing() -> None:
    assert config_from_args(parse()) is None
    assert config_from_args(parse("--num-layers", "4")) is None


@each_field
def test_a_setting_without_the_switch_is_one_line_before_anything_starts(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    default = None if name in LEVERS else TimelyFreezeConfig.model_fields[name].default
    others = [pair for pair in GOOD[name] if pair[1] != default]
    if not others:
        pytest.skip("a setting of one value")
    text, value = others[0]
    line = f"{option(name)} is {value!r}, but --timely-freeze is not given: give it, or leave {option(name)} out"
    with pytest.raises(SystemExit) as caught:
        parse(option(name), text)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {line}\n")
    with pytest.raises(ConfigError) as refused:
        config_from_args(argparse.Namespace(timely_freeze=False, **{f"timely_freeze_{name}": value}))
    assert str(refused.value) == line


def test_a_namespace_without_our_arguments_is_no_freezing() -> None:
    assert config_from_args(argparse.Namespace()) is None
    assert config_from_args(host_parser().parse_args([])) is None


def test_a_namespace_with_some_of_our_arguments_has_defaults_for_the_rest() -> None:
    """An older script's namespace, or one that was put together by hand."""
    args = argparse.Namespace(timely_freeze=True, timely_freeze_seed=3)
    assert config_from_args(args) == TimelyFreezeConfig(seed=3)


def test_a_value_that_a_script_set_itself_is_checked_too() -> None:
    args = parse("--timely-freeze")
    args.timely_freeze_seed = -1
    with pytest.raises(ConfigError, match=r"timely_freeze\.seed is -1: allowed is an integer from 0 to 9,223"):
        config_from_args(args)
