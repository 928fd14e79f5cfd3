"""Ways into trainers that stand on a host: each module belongs to the trainer of its name, and stands on ``run``."""
