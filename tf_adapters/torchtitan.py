"""The old path of ``tf_adapters.trainers.torchtitan``."""

from tf_adapters.trainers.torchtitan import install as install
from tf_adapters.trainers.torchtitan import main as main

if __name__ == "__main__":
    main()
