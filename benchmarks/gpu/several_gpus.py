"""The pipeline of ``pipeline_on_one_gpu.py`` over NCCL, a GPU for each rank."""

from benchmarks.gpu.pipeline_on_one_gpu import SEVERAL

PART = SEVERAL
