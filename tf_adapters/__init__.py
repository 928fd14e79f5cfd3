"""TimelyFreeze inside the frameworks that people train pipelines with.

The hosts live in subpackages and are imported only when asked for:
``tf_adapters.deepspeed`` needs DeepSpeed, nothing else here does.
"""

__version__ = "0.1.0"
