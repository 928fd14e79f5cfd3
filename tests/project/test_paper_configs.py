"""The ready configs for the paper's models, against its table "Experimental setup"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tf_adapters.config import TimelyFreezeConfig, find_section
from tf_adapters.training.state import RunState

FOLDER = Path(__file__).resolve().parents[2] / "deepspeed_configs" / "paper"
# T_w, T_m, T_f; r_max; T_APF; P_Auto; global batch; steps, warm-up; learning rate
TABLE = {
    "llama_3.2_1b": ((60, 100, 200), 0.8, 0.01, 80, 128, (800, 100), 5e-6),
    "llama_3_8b": ((160, 200, 250), 0.8, 0.0001, 80, 64, (2000, 200), 3e-6),
    "llama_2_13b": ((150, 200, 250), 0.8, 0.0001, 80, 64, (2000, 200), 3e-6),
    "convnext_v2_l": ((2350, 2850, 5600), 0.5, 0.005, 80, 64, (20000, 2500), 1e-4),
    "vit_l_32": ((1400, 1600, 2400), 0.8, 0.005, 80, 512, (17500, 1500), 3e-3),
}


def test_every_model_of_the_table_has_one() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_a_config_says_what_the_table_says(name: str) -> None:
    phases, ratio, threshold, percentile, batch, (steps, warmup), rate = TABLE[name]
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    section = TimelyFreezeConfig.parse(find_section(config))
    ends = RunState.fresh(section, auto_warmup=0).phases
    assert (ends.warmup_end, ends.monitoring_end, ends.progressive_end) == phases
    assert section.max_freeze_ratio == ratio
    assert section.apf_threshold == threshold
    assert section.autofreeze_percentile == percentile
    assert section.seed == 42
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] == batch
    assert config["scheduler"]["params"] == {"total_num_steps": steps, "warmup_num_steps": warmup}
    assert config["optimizer"]["params"]["lr"] == rate


@pytest.mark.parametrize("method", ["timely+apf", "timely+autofreeze", "apf", "autofreeze"])
@pytest.mark.parametrize("name", TABLE)
def test_its_method_may_be_any(name: str, method: str) -> None:
    section = find_section(json.loads((FOLDER / f"{name}.json").read_text()))
    assert TimelyFreezeConfig.parse({**(section or {}), "method": method}).method == method
