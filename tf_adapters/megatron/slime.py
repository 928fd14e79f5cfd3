"""The old path of ``tf_adapters.trainers.slime``."""

from tf_adapters.trainers.slime import before_train_step as before_train_step
from tf_adapters.trainers.slime import detach as detach
