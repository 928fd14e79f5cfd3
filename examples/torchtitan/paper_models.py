"""The paper's Llamas that TorchTitan 0.2 does not have: ``--experimental.custom_import paper_models`` adds them.

Sizes are those of the published checkpoints; the output layer has a weight of its own, also in the 1B model.
"""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

llama3_args["3.2-1B"] = TransformerModelArgs(
    dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, multiple_of=1024, rope_theta=500000
)
llama3_args["2-13B"] = TransformerModelArgs(dim=5120, n_layers=40, n_heads=40, vocab_size=32000, rope_theta=10000)
