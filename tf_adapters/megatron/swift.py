"""The old path of ``tf_adapters.trainers.swift``."""

from tf_adapters.trainers.swift import TimelyFreezeCallback as TimelyFreezeCallback
from tf_adapters.trainers.swift import register as register
