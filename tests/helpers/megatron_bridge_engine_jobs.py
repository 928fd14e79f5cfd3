"""The jobs of ``megatron_bridge_jobs`` with Bridge's own choice of layers: Transformer Engine's, whose Python is real.

Only its compiled extension is a stand-in.
"""

from __future__ import annotations

import megatron_bridge_jobs
from megatron_bridge_jobs import AT_SAVED, BY_ITS_WARMUP, Job, run

from tf_adapters.testing import transformer_engine_on_cpu

DEFERRED = {**BY_ITS_WARMUP, "weight_gradients": "deferred"}
SAMPLED = {**DEFERRED, "granularity": "token", "output_dir": "run"}
JOBS = {
    "alone": Job(engine=True),
    "nothing frozen": Job(engine=True, section={**DEFERRED, "max_freeze_ratio": 0.0, "output_dir": "nothing"}),
    "whole": Job(engine=True, section=SAMPLED, save="run"),
    "resumed": Job(engine=True, section={**SAMPLED, "output_dir": "resumed"}, load="run", checkpoint=AT_SAVED),
    "wrong setting": Job(engine=True, section={"max_freeze_ratio": 6}),
}

__all__ = ["JOBS", "prepare", "run"]


def prepare() -> None:
    transformer_engine_on_cpu.install()
    megatron_bridge_jobs.prepare()
