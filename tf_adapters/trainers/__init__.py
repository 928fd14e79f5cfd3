"""Freezing in trainers that stand on a host. Each module is for the trainer of its name, on the base in ``run``."""
