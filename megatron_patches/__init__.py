"""What freezing replaces in Megatron: one small module for each symbol, each applied and taken back on its own.

``tf_adapters.megatron`` decides what happens there; a patch only lets it. Every module has ``apply`` and
``revert``; a symbol that a version of Megatron does not have is an UnsupportedError that names its path.
"""
