"""Print how the three heuristics cut both models. One process, nothing is trained."""

from __future__ import annotations

import argparse

import data
from models import ConvNeXtConfig, ViTConfig
from partition import HEURISTICS
from train import Parser, measured_stages, prepare_device, read_ds_config

MODELS = {"vit": ViTConfig(), "convnext": ConvNeXtConfig()}


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--deepspeed_config", required=True, help="for the size, number and type of microbatches")
    parser.add_argument("--stages", type=int, default=2)
    args = parser.parse_args()
    try:
        args.ds_config = read_ds_config(args.deepspeed_config)
    except ValueError as error:
        parser.error(str(error))
    fewest = min(len(config.layers()) for config in MODELS.values())
    if not 1 <= args.stages <= fewest:
        parser.error(f"--stages {args.stages}: the models allow 1 to {fewest}")
    return args


def main() -> None:
    args = parse_args()
    prepare_device(0)
    for name, config in MODELS.items():
        training, _ = data.load(config.image)
        stages = measured_stages(config, args.stages, args.ds_config, training)
        for heuristic in HEURISTICS:
            print(f"\n{name}, partition by {heuristic}:\n{stages.table(stages.boundaries(heuristic))}")


if __name__ == "__main__":
    main()
