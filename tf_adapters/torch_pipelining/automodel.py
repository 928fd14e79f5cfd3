"""The old path of ``tf_adapters.trainers.automodel``."""

from tf_adapters.trainers.automodel import Freezing as Freezing
from tf_adapters.trainers.automodel import FreezingRecipe as FreezingRecipe
from tf_adapters.trainers.automodel import main as main

if __name__ == "__main__":
    main()
