"""Measuring commands: start each from the repository's root, as README.md beside this file shows."""
