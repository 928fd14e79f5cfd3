"""ms-swift's own ``megatron sft`` on a tiny GPT in two pipeline stages; see ``forked_jobs``.

Real: the command's own function with its arguments, plugin file, tokenizer, template and data; ``MegatronTrainer`` with
its loop, step, loss, samplers, callbacks, logs and Megatron checkpoints; Megatron-Core's schedule, DDP and optimizer.
Stand-ins: ``mcore_bridge``, which builds the model from Hugging Face weights (here a GPT of Transformer Engine's layers
where that is there, else of Megatron-Core's own); the warm-up of fused kernels.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import megatron_ranks as ranks
import torch
from forked_jobs import FREEZING, StandIn, Told, digest

from tf_adapters.testing import transformer_engine_on_cpu

HALF = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
ENGINE = transformer_engine_on_cpu.available()
CASE = ranks.Case(
    pp=2, engine=ENGINE, model={**HALF, "variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
)
PLUGIN = "from tf_adapters.trainers.swift import register\n\nregister({settings})\n"
JOBS: dict[str, dict[str, Any]] = {
    "alone": {"where": "alone"},
    "nothing frozen": {"where": "nothing", "section": {**FREEZING, "max_freeze_ratio": 0.0}},
    "whole": {"where": "run", "section": FREEZING},
    "resumed": {"where": "resumed", "section": FREEZING, "from": "run/checkpoint-8"},
    "wrong setting": {"where": "wrong", "section": {"max_freeze_ratio": 6}},
}
WORDS = [f"w{number}" for number in range(ranks.VOCABULARY - 4)]
ARGUMENTS = (
    *(
        "--model_type",
        "llama",
        "--template",
        "dummy",
        "--tuner_type",
        "full",
        "--torch_dtype",
        "bfloat16",
        "--padding_free",
        "false",
    ),
    *("--pipeline_model_parallel_size", "2", "--micro_batch_size", "2", "--global_batch_size", "8"),
    *("--train_iters", "12", "--save_steps", "8", "--logging_steps", "1", "--eval_iters", "0"),
    *("--lr", "1e-2", "--min_lr", "1e-2", "--lr_warmup_iters", "0", "--lr_decay_style", "constant"),
    *("--split_dataset_ratio", "0", "--dataset_num_proc", "1", "--dataloader_num_workers", "0"),
    *("--max_length", str(ranks.CONTEXT), "--add_version", "false", "--check_model", "false"),
    *("--ddp_backend", "gloo", "--attention_backend", "local", "--save_safetensors", "false"),
    *("--use_distributed_optimizer", "false", "--gradient_accumulation_fusion", "false"),
)


def prepare() -> None:
    import swift.sequence_parallel  # noqa: F401  # compiles a function, which must be torch's own

    from tf_adapters.testing import megatron_on_cpu

    if ENGINE:
        transformer_engine_on_cpu.install()
    megatron_on_cpu.install()
    for name in ("mcore_bridge", "mcore_bridge.utils", "mcore_bridge.model", "mcore_bridge.config"):
        sys.modules[name] = StandIn(name)
    meta = types.SimpleNamespace(model_type="gpt", is_multimodal=False)
    vars(sys.modules["mcore_bridge.model"]).update(
        get_mcore_model_type=lambda name: "gpt", get_model_meta=lambda name: meta
    )
    from megatron.core.utils import unwrap_model

    vars(sys.modules["mcore_bridge"]).update(set_random_seed=lambda seed, *_: None, unwrap_model=unwrap_model)
    from swift.megatron.arguments import MegatronSftArguments

    MegatronSftArguments._check_bridge_backend = lambda self: None
    base = importlib.import_module("swift.megatron.trainers.base")
    vars(base)["warmup_jit_function"] = lambda config, args: None
    vars(base)["get_mcore_model"] = _model
    vars(torch.cuda).update(device_count=lambda: 2, max_memory_reserved=lambda: 0)
    importlib.import_module("swift.megatron.pipelines.train.sft")
    import tf_adapters.trainers.swift  # noqa: F401


def _model(args: Any, hf_config: Any) -> list[Any]:
    """In the place of the one that mcore_bridge builds and fills."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)
    chunks = [ranks.innermost(chunk) for chunk in ranks.build_chunks(CASE, wrap=False)]
    for chunk in chunks:
        chunk.config.bridge = StandIn("bridge")
        vars(chunk.config.bridge).update(load_weights=lambda *_, **__: None)
        vars(chunk)["forward"] = _taking_what_is_known(chunk.forward)
    return chunks


def _taking_what_is_known(forward: Any) -> Any:
    def plain(
        input_ids: Any = None, position_ids: Any = None, attention_mask: Any = None, labels: Any = None, **_: Any
    ) -> Any:
        return forward(input_ids, position_ids, attention_mask, labels=labels)

    return plain


def run(job: dict[str, Any], folder: Path, told: Told) -> None:
    from megatron.core import parallel_state
    from swift.megatron.pipelines.train import sft

    trainers: list[Any] = []

    class Trainer(sft.MegatronTrainer):
        def __init__(self, args: Any, template: Any) -> None:
            trainers.append(self)
            super().__init__(args, template)

        def on_log(self, logs: Any, prefix: str = "") -> None:
            super().on_log(logs, prefix)
            if "loss" in logs:  # on the rank of the last stage
                told.losses[self.state.iteration] = logs["loss"]
            told.figures[self.state.iteration] = {k: v for k, v in logs.items() if "timely" in k}

    rank = int(__import__("os").environ["RANK"])
    made = folder / f"made-{rank}"
    _write_model(made)
    given = [
        *ARGUMENTS,
        "--model",
        str(made),
        "--dataset",
        str(made / "data.jsonl"),
        "--output_dir",
        str(folder / job["where"]),
    ]
    if "section" in job:
        plugin = made / f"plugin_of_{job['where']}.py"
        plugin.write_text(PLUGIN.format(settings=job["section"]))
        given += ["--external_plugins", str(plugin), "--callbacks", "timely_freeze"]
    if "from" in job:
        given += ["--mcore_model", str(folder / job["from"]), "--finetune", "false"]
    before, sft.MegatronTrainer = sft.MegatronTrainer, Trainer
    try:
        sft.megatron_sft_main(given)
        told.parameters = digest(p for model in trainers[0].unwrapped_models for p in model.parameters())
        ours = [callback for callback in trainers[0].callbacks if type(callback).__name__ == "TimelyFreezeCallback"]
        told.more["detached"] = all(callback.adapter is None for callback in ours)
    finally:
        sft.MegatronTrainer = before
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _write_model(folder: Path) -> None:
    """A Hugging Face folder of a tiny model, without weights, and its data: each sentence has a few of its words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if folder.exists():
        return
    folder.mkdir()
    names = ["<unk>", "<s>", "</s>", "<pad>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "tokenizer_class": "PreTrainedTokenizerFast"}))
    sizes = {
        "hidden_size": ranks.WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": ranks.HEADS,
        "intermediate_size": 64,
    }
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": ranks.VOCABULARY, **sizes}
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": ranks.CONTEXT, "torch_dtype": "bfloat16"})
    )
    rows = [
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": " ".join(WORDS[(7 * n + k * (n % 5 + 1)) % len(WORDS)] for k in range(4 + n % 3)),
                }
            ]
        }
        for n in range(64)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
