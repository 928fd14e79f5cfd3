"""``tf-adapters check``: what a DeepSpeed config's section means, or the line with which the job would stop."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tf_adapters.cli import main
from tf_adapters.cli.configs import ready_configs
from tf_adapters.config import TimelyFreezeConfig
from tf_adapters.errors import ConfigError


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Check a config, which is given as JSON values or as text; returns the status, the output and the error."""

    def run(config: Any) -> tuple[int, str, str]:
        path = tmp_path / "ds_config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        status = main(["check", str(path)])
        return (status, *capsys.readouterr())

    return run


def said(check: Any, config: Any) -> list[str]:
    status, out, err = check(config)
    assert (status, err) == (0, "")
    return list(out.splitlines())


def test_it_says_what_a_ready_config_means(check: Any) -> None:
    assert said(check, ready_configs()["plain"].read_text()) == [
        "on: goal exact (the same bits as without)",
        "steps 1 to 20: warm-up",
        "steps 21 to 60: monitoring",
        "from step 61: weight gradients deferred as planned, none skipped",
        "monitoring may end earlier, once its times are precise; later phases then begin earlier",
        "placement: stages where DeepSpeed puts them; schedule: DeepSpeed's own, then the order of the plan",
        "report: timely_freeze/report.json",
        "max_freeze_ratio: 0.0 (chosen by the goal)",
        'granularity: "tensor" (chosen by the goal)',
        'weight_gradients: "deferred" (chosen by the goal)',
    ]


def test_it_names_every_setting_that_differs_from_its_default(check: Any) -> None:
    section = {
        "goal": "paper",
        "max_freeze_ratio": 0.5,
        "monitoring": "halves",
        "warmup_steps": 0,
        "output_dir": "runs",
    }
    assert said(check, section) == [  # the section alone
        "on: goal paper (skips up to 50% of weight gradients)",
        "steps 1 to 20: monitoring, nothing frozen",
        "steps 21 to 40: monitoring, weight gradients frozen",
        "steps 41 to 90: progressive freezing",
        "from step 91: stable freezing",
        "placement: stages where DeepSpeed puts them; schedule: DeepSpeed's own",
        "report: runs/timely_freeze/report.json",
        "max_freeze_ratio: 0.5 (the goal would choose 0.8)",
        'granularity: "tensor" (chosen by the goal)',
        'weight_gradients: "in_place" (chosen by the goal)',
        'warmup_steps: 0 (default "auto")',
        'monitoring: "halves" (default "mixed")',
        'output_dir: "runs" (default ".")',
    ]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"timely_freeze": {"placement": "v"}},
            "placement: two stages on each rank, in a V; schedule: DeepSpeed's own",
        ),
        ({"timely_freeze": {"schedule": "gpipe", "weight_gradients": "in_place"}}, "schedule: gpipe"),
        ({"timely_freeze": {"weight_gradients": "in_place"}}, "from step 51: planned, nothing frozen"),
        ({"timely_freeze": {"method": "none"}}, "from step 51: measured; every step runs as the host alone"),
        ({"timely_freeze": {"method": "apf"}}, "on: without a goal (freezes stable parameters, without a plan)"),
        ({"timely_freeze": {"method": "apf"}}, "from step 11: stability checks every 50 steps; apf freezes"),
        ({"timely_freeze": {}}, "the config names no warm-up of a scheduler: one that the script makes may"),
        ({"timely_freeze": {}, "scheduler": {"type": "WarmupDecayLR"}}, "steps 1 to 1000: warm-up"),
        (
            {"timely_freeze": {}, "gradient_clipping": 1.0},
            "warning: gradient_clipping is 1 with ZeRO stage 0 in fp32: ",
        ),
        ({"timely_freeze": {"enabled": False}}, 'off: "enabled" is false'),
        ({"train_batch_size": 8}, 'off: the config has no "timely_freeze" section'),
    ],
)
def test_a_line_says(check: Any, config: Any, line: str) -> None:
    assert line in "\n".join(said(check, config))


@pytest.mark.parametrize("more", [{"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}])
def test_clipping_is_right_with_zero_1_or_bf16(check: Any, more: dict[str, Any]) -> None:
    assert "warning" not in "\n".join(said(check, {"timely_freeze": {}, "gradient_clipping": 1.0, **more}))


@pytest.mark.parametrize(
    "section", [{"goal": "fast"}, {"sed": 1}, {"goal": "exact", "max_freeze_ratio": 0.5}, 3, {"optimizer_step": "v"}]
)
def test_a_wrong_section_ends_with_the_line_of_training(check: Any, section: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        TimelyFreezeConfig.parse(section)
    assert check({"timely_freeze": section}) == (2, "", f"tf-adapters check: {caught.value}\n")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"fp16": {"enabled": True}}, "fp16 is not supported; use bf16 or fp32"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast in fp16 is not supported"),
        ({"amp": {"enabled": True}}, 'mixed precision by NVIDIA Apex ("amp") is not supported'),
        (
            {"zero_optimization": {"stage": 3}},
            "DeepSpeed's pipeline engine does not run ZeRO stage 3; use stage 0 or 1",
        ),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "ZeRO's optimizer offload"),
        ({"optimizer": {"type": "OneBitAdam"}}, "the optimizer OneBitAdam is not supported; use Adam"),
    ],
)
def test_what_attach_would_refuse_is_refused(check: Any, more: dict[str, Any], words: str) -> None:
    status, out, err = check({"timely_freeze": {}, **more})
    assert (status, out) == (2, "")
    assert err.startswith(f"tf-adapters check: timely_freeze cannot run here: {words}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"timely_freeze": {"goal": "paper", "goal": "exact"}}', "field 'goal' is there twice"),
        ('{"seed": NaN}', "NaN is not JSON: numbers are finite"),
        ('{\n// ours\n"timely_freeze": {}}', "not JSON: "),
        ("[]", "this is not a DeepSpeed config: a config is a JSON object"),
        ('{"timely_frezze": {}}', 'unknown section "timely_frezze" in the config: did you mean "timely_freeze"?'),
    ],
)
def test_a_wrong_file_ends_with_one_line(check: Any, text: str, words: str) -> None:
    status, out, err = check(text)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_it_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"timely_freeze": {"goal": "paper"}}'))
    assert main(["check", "-"]) == 0
    assert capsys.readouterr().out.startswith("on: goal paper (")
