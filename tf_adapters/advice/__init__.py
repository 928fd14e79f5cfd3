"""Advice from the report of a measured run: the gain of each lever, and a better cut of the layers."""
