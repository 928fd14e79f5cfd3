"""Jobs of NeMo AutoModel's own recipe, on a tiny Llama in two pipeline stages; see ``forked_jobs``."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import yaml

from tf_adapters.testing.ranks import free_port

JOB: dict[str, Any] = {
    "step_scheduler": {
        "global_batch_size": 4,
        "local_batch_size": 4,
        "ckpt_every_steps": 10,
        "val_every_steps": 1000,
        "num_epochs": 1,
    },
    "dist_env": {"backend": "gloo", "timeout_minutes": 3},
    "seed": 7,
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "config": {
            "_target_": "transformers.LlamaConfig",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "architectures": ["LlamaForCausalLM"],
        },
        "force_hf": True,
        "attn_implementation": "sdpa",
        "torch_dtype": "float32",
        "use_liger_kernel": False,
    },
    "distributed": {
        "strategy": "fsdp2",
        "pp_size": 2,
        "tp_size": 1,
        "cp_size": 1,
        "pipeline": {"pp_schedule": "1f1b", "pp_microbatch_size": 1, "scale_grads_in_schedule": False},
    },
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "dataset": {
        "_target_": "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset",
        "num_sentences": 64,
        "vocab_size": 64,
        "mean_len": 15,
        "std_len": 0,
        "max_sentence_len": 15,
        "tokenizer": None,
    },
    "dataloader": {
        "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
        "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
        "shuffle": False,
    },
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1.0e-3},
    "lr_scheduler": {"lr_decay_style": "constant", "lr_warmup_steps": 2, "min_lr": 1.0e-3},
}
FREEZING = {"monitoring_steps": 4, "progressive_steps": 2, "report_every": 1, "on_error": "raise"}


def prepare() -> None:
    from tf_adapters.testing import automodel_on_cpu

    automodel_on_cpu.install()
    import tf_adapters.torch_pipelining.automodel  # noqa: F401


def run(rank: int, folder: Path) -> dict[str, Any]:
    os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled", HF_DATASETS_CACHE=f"{folder}/cache{rank}")
    whole = str(folder / "run" / "epoch_0_step_9")
    saved = {"enabled": True, "model_save_format": "torch_save", "save_consolidated": False}
    jobs: dict[str, tuple[str, int, dict[str, Any]]] = {
        "alone": ("alone", 9, {}),
        "nothing frozen": ("nothing", 9, {"timely_freeze": {**FREEZING, "max_freeze_ratio": 0.0}}),
        "deferred": (
            "deferred",
            9,
            {"timely_freeze": {**FREEZING, "max_freeze_ratio": 0.0, "weight_gradients": "deferred"}},
        ),
        "whole": ("run", 14, {"timely_freeze": FREEZING, "checkpoint": saved}),
        "resumed": ("resumed", 14, {"timely_freeze": FREEZING, "checkpoint": {**saved, "restore_from": whole}}),
        "linear loss": (
            "linear",
            9,
            {
                "timely_freeze": FREEZING,
                "loss_fn": {
                    "_target_": "nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy",
                    "compile": False,
                },
            },
        ),
        "no section": ("none", 2, {}),
        "wrong setting": ("wrong", 2, {"timely_freeze": {"max_freeze_ratio": 6}}),
    }
    return {
        name: _run_job(name, folder / where, {"max_steps": steps, **JOB["step_scheduler"]}, changes)
        for name, (where, steps, changes) in jobs.items()
    }


def _run_job(name: str, folder: Path, scheduler: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from nemo_automodel.recipes.llm import train_ft

    from tf_adapters.torch_pipelining import automodel

    job = {**copy.deepcopy(JOB), "step_scheduler": scheduler, **copy.deepcopy(changes)}
    job["checkpoint"] = {"enabled": False, **job.get("checkpoint", {}), "checkpoint_dir": str(folder)}
    rank = os.environ["RANK"]
    file = folder.parent / f"{folder.name}-{rank}.yaml"
    file.write_text(yaml.safe_dump(job))
    sys.argv = ["job", "-c", str(file)]
    os.environ["MASTER_PORT"] = str(_port(folder.parent, name))
    frozen: dict[str, Any] = {}
    log = train_ft.TrainFinetuneRecipeForNextTokenPrediction.log_train_metrics
    losses, figures, status = {}, {}, 0

    def logged(self: Any, data: Any) -> None:
        losses[data.step] = data.metrics["loss"]
        figures[data.step] = {k: v for k, v in data.metrics.items() if k.startswith("timely_freeze")}
        adapter = getattr(getattr(self, "timely_freeze", None), "adapter", None)
        if adapter is not None:
            units = adapter.controller.pipeline.units
            frozen["units"] = {stage: [n for unit in of for n in unit.names] for stage, of in units.items()}
        log(self, data)

    train_ft.TrainFinetuneRecipeForNextTokenPrediction.log_train_metrics = logged
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            (train_ft.main if name == "alone" else automodel.main)(str(file))
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            status = 1
            traceback.print_exc(file=said)
        finally:
            train_ft.TrainFinetuneRecipeForNextTokenPrediction.log_train_metrics = log
    if dist.is_initialized():
        dist.destroy_process_group()
    Path(f"{file}.log").write_text(said.getvalue())
    told = said.getvalue()
    lines = [line for line in told.splitlines() if "timely_freeze" in line or "error:" in line]
    return {"status": status, "losses": losses, "figures": figures, "lines": lines, "end": told[-3000:], **frozen}


def _port(folder: Path, name: str) -> int:
    """One port for a job: rank 0 finds it, the other reads it."""
    file = folder / f"port-{name.replace(' ', '-')}"
    if os.environ["RANK"] == "0":
        draft = file.with_suffix(".new")
        draft.write_text(str(free_port()))
        draft.rename(file)
    while not file.exists():
        time.sleep(0.01)
    return int(json.loads(file.read_text()))
