"""The jobs of ``automodel_jobs`` on AutoModel's own Qwen3 MoE, whose attention has Transformer Engine's linear layers.

Transformer Engine's Python is real. Only its compiled extension is a stand-in.
"""

from __future__ import annotations

import automodel_jobs
from automodel_jobs import JOB, run

from tf_adapters.testing import transformer_engine_on_cpu

MODEL = {
    **JOB["model"],
    "config": {
        **JOB["model"]["config"],
        "_target_": "transformers.Qwen3MoeConfig",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "architectures": ["Qwen3MoeForCausalLM"],
    },
    "force_hf": False,
    "backend": {
        "_target_": "nemo_automodel.components.models.common.utils.BackendConfig",
        "attn": "sdpa",
        "linear": "te",
        "rms_norm": "torch",
        "experts": "torch",
        "dispatcher": "torch",
        "rope_fusion": False,
    },
}
USED = ("alone", "nothing frozen", "whole", "resumed", "wrong setting", "larger batch", "larger batch, exact", "tokens")
JOBS = {name: {**automodel_jobs.JOBS[name], "model": MODEL} for name in USED}

__all__ = ["JOBS", "prepare", "run"]


def prepare() -> None:
    transformer_engine_on_cpu.install()
    automodel_jobs.prepare()
