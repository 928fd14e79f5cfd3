"""The old path of ``tf_adapters.trainers.bridge``."""

from tf_adapters.trainers.bridge import TimelyFreezeCallback as TimelyFreezeCallback
