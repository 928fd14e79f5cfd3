"""Time of a weight gradient from sampled tokens, relative to the whole product, by the width of the layer.

One layer, one thread, float32, the adapters' own sampler. Every share of the tokens is timed in turn with the whole
product, and a line is fitted to the times. Freed memory stays with the process, as with the allocators of GPUs.

Writes results/core/token_cost.json, and the table into docs/tokens.md.
"""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.shared.commands import command_line
from benchmarks.shared.files import ROOT, markdown_table, put_table, result_file, write_json
from benchmarks.shared.measuring import keep_freed_memory, machine
from tf_adapters.weight_gradients.tapped_layer import linear_gradient
from tf_adapters.weight_gradients.tokens import TokenSampler

RESULTS = result_file("core/token_cost.json")
PAGE = ROOT / "docs" / "tokens.md"
LAYERS = {
    "512 x 512": (512, 512),
    "1,024 x 1,024": (1_024, 1_024),
    "1,024 x 4,096": (1_024, 4_096),
    "4,096 x 1,024": (4_096, 1_024),
    "2,048 x 2,048": (2_048, 2_048),
}
"""Inputs and outputs."""

TOKENS = 2_048
KEPT = (1.0, 0.8, 0.6, 0.4, 0.25)
ROUNDS = 15


def main() -> None:
    command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = {name: measured(*widths) for name, widths in LAYERS.items()}
    write_json(RESULTS, {"machine": machine(), "tokens": TOKENS, "rows": rows})
    put_table(PAGE, "token_cost", table(rows))
    print(table(rows))


def measured(inputs: int, outputs: int) -> dict[str, float]:
    """Times as shares of the whole product's: by the share of the tokens that is kept, and the line through them."""
    torch.manual_seed(0)
    x, gradient = torch.randn(TOKENS, inputs), torch.randn(TOKENS, outputs) * torch.rand(TOKENS, 1)
    weight = torch.empty(outputs, inputs)
    rounds: dict[float, list[float]] = {kept: [] for kept in KEPT}
    for number in range(ROUNDS):
        for kept, times in rounds.items():
            sampler = TokenSampler((0, number), lambda _, kept=kept: kept)
            began = time.perf_counter()
            linear_gradient(weight, x, gradient, sampler.rows)
            times.append(time.perf_counter() - began)
    whole = rounds[1.0]
    shares = {
        kept: statistics.median(a / b for a, b in zip(times, whole, strict=True)) for kept, times in rounds.items()
    }
    line = statistics.linear_regression(KEPT[1:], [shares[kept] for kept in KEPT[1:]])
    return {
        "whole_ms": 1e3 * statistics.median(whole),
        **{f"{kept:g}": shares[kept] for kept in KEPT[1:]},
        "fixed": line.intercept,
        "per_token": line.slope,
    }


def table(rows: dict[str, dict[str, float]]) -> str:
    titles = [f"{kept:.0%} kept" for kept in KEPT[1:]]
    lines = []
    for name, row in rows.items():
        shares = [f"{row[f'{kept:g}']:.3f}" for kept in KEPT[1:]]
        line = f"{row['fixed']:.3f} + {row['per_token']:.2f} kept"
        lines.append([name, f"{row['whole_ms']:.1f} ms", *shares, line])
    return markdown_table(["layer, inputs x outputs", "whole", *titles, "line"], lines)


if __name__ == "__main__":
    main()
