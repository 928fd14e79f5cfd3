"""Two chunks on each rank in a V: which layers a chunk has, which stage it is, and the order of a batch.

Rank r of S holds the stages S - 1 - r and S + r, so the last rank has the first stage and the last one::

    rank 0 | stages 3 4
    rank 1 | stages 2 5
    rank 2 | stages 1 6
    rank 3 | stages 0 7

This is the V of Qi et al. (Pipeline Parallelism with Controllable Memory, 2024) with the ranks in reverse order.
Megatron reads losses, counts tokens and writes its log on the last rank, and all of that stays as it is.
Source: megatron/core/transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from tf_adapters.errors import ConfigError
from tf_adapters.schedule.ir import Kind, PipelineSchedule
from tf_adapters.schedule.orders import v_with_whole_backwards


@dataclass(frozen=True)
class PipelinePosition:
    """The position of this rank in the pipeline, and whether its chunks are in a V."""

    rank: int
    size: int
    chunks: int
    in_v: bool = False

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of the rank's chunks."""
        return tuple(map(self.stage, range(self.chunks)))

    def stage(self, chunk: int) -> int:
        """Return the stage of a chunk. Without a V, chunk c of rank r is stage ``c * size + r``."""
        if not self.in_v:
            return chunk * self.size + self.rank
        return self.size - 1 - self.rank if chunk == 0 else self.size + self.rank


class VLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """Megatron's description of the layers on each rank, for chunks in a V.

    ``layout`` has the layers of each stage in the order of the stages, as ``--pipeline-model-parallel-layout`` has.
    Raises ConfigError if there are not two stages for each rank.
    """

    def __init__(self, layout: str | list[list[Any]], pipeline_model_parallel_size: int) -> None:
        size = pipeline_model_parallel_size
        stages = self.parse_str_to_list(layout) if isinstance(layout, str) else list(layout)
        if len(stages) != 2 * size:
            raise ConfigError(
                f'the pipeline layout has {len(stages)} stages: allowed with placement "v" are {2 * size}, two for '
                "each pipeline rank"
            )
        super().__init__([*reversed(stages[:size]), *stages[size:]], size)
        self.input_data = layout
        self._stages = [self._of_stage(stage) for stage in range(2 * size)]
        self.flatten_layout = [layer for layers in self._stages for layer in layers]

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return how many layers the stages before a chunk have."""
        from megatron.core import parallel_state

        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        stage = PipelinePosition(rank, self.pipeline_model_parallel_size, 2, in_v=True).stage(vp_stage or 0)
        return sum(layers.count(layer_type) for layers in self._stages[:stage])

    def _of_stage(self, stage: int) -> list[LayerType]:
        size = self.pipeline_model_parallel_size
        return self.layout[size - 1 - stage][0] if stage < size else self.layout[stage - size][1]  # type: ignore[no-any-return]


def position(pp_group: Any, chunks: Sequence[Any], config: Any) -> PipelinePosition:
    """Return this rank's position in a pipeline of model chunks; ``config`` is their TransformerConfig."""
    return PipelinePosition(pp_group.rank(), pp_group.size(), len(chunks), is_in_v(config))


def is_in_v(config: Any) -> bool:
    """Return whether the chunks of a model with this TransformerConfig are in a V."""
    return isinstance(getattr(config, "pipeline_model_parallel_layout", None), VLayout)


def even_layout(num_layers: int, size: int, output_layers: float = 0.0) -> str:
    """Return a layout of two stages for each of ``size`` ranks, as even as possible.

    ``output_layers`` is the cost of the last stage's output layer and loss, in decoder layers. The last stage gets that
    many layers fewer, but at least one. Raises ConfigError if there is not one layer for each stage.
    """
    stages = 2 * size
    if num_layers < stages:
        raise ConfigError(
            f'--num-layers is {num_layers}: allowed with placement "v" is at least {stages}, one for each of two '
            "stages on each pipeline rank"
        )
    last = max(1, round((num_layers + output_layers) / stages - output_layers))
    each, more = divmod(num_layers - last, stages - 1)
    # Stages in the middle get what is left over: the first one has the embedding.
    counts = [each + (stage > 0 and stage <= more) for stage in range(stages - 1)] + [last]
    texts = ["t" * count for count in counts]
    return "|".join(["E" + texts[0], *texts[1:-1], texts[-1] + "L"])


@functools.lru_cache
def v_order(size: int, microbatches: int) -> PipelineSchedule:
    """Return the order of a batch: rank r does what rank S - 1 - r of the published V does."""
    return PipelineSchedule(tuple(reversed(v_with_whole_backwards(size, microbatches).ranks)))


def v_forwards(size: int, microbatches: int) -> PipelineSchedule:
    """Return the order of a batch that only evaluates."""
    rows = v_order(size, microbatches).ranks
    return PipelineSchedule(tuple(tuple(a for a in row if a.kind is Kind.FORWARD) for row in rows))
