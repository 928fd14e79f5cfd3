"""What a prediction may count, or leave out, beside the package's own cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action
from tf_adapters.simulate.model_costs import LlamaShape, StageCost, stage_costs


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What else is counted, or is not. Bytes are turned into FLOPs at ``flops_per_byte``, the machine's balance."""

    attention_share: float = 0.5
    """Share of the sequence x sequence scores that is computed: a half with a causal kernel, 1 without."""
    recompute: float = 0.0
    """Share of the layers whose forward the backward runs again (activation checkpointing)."""
    head: bool = True
    """Whether the last stage has the output head."""
    loss_forward_bytes: float = 0.0
    """Memory traffic of the loss, forward, in bytes for each logit."""
    loss_backward_bytes: float = 0.0
    """The same, backward: it belongs to the input gradient."""
    weight_gradient_bytes: float = 0.0
    """Memory traffic of adding up the weight gradient, in bytes for each weight and microbatch."""
    flops_per_byte: float = 0.0

    def costs(self, shape: LlamaShape, layers: Sequence[int], sequences: int, length: int) -> tuple[StageCost, ...]:
        """``stage_costs`` with these options."""
        more = self._layer(shape, sequences * length, length)
        plain = stage_costs(shape, layers, sequences, length)
        costs = [cost + more.scaled(count) for cost, count in zip(plain, layers, strict=True)]
        costs[-1] += self._head(shape, sequences * length)
        return tuple(costs)

    def _layer(self, shape: LlamaShape, tokens: int, length: int) -> StageCost:
        """What a layer costs more."""
        scores = 4.0 * tokens * length * shape.hidden_size
        more = scores * (self.attention_share - 0.5)
        forward = 2.0 * tokens * shape.layer_weights + scores * self.attention_share
        added = shape.layer_weights * self.weight_gradient_bytes * self.flops_per_byte
        return StageCost(more, 2.5 * more + self.recompute * forward, added)

    def _head(self, shape: LlamaShape, tokens: int) -> StageCost:
        """What the head costs more."""
        if not self.head:
            return StageCost(*[-2.0 * tokens * shape.embedding_weights] * 3)
        logits = tokens * shape.vocab_size * self.flops_per_byte
        added = shape.embedding_weights * self.weight_gradient_bytes * self.flops_per_byte
        return StageCost(logits * self.loss_forward_bytes, logits * self.loss_backward_bytes, added)


@dataclass(frozen=True)
class Variant:
    """Assumptions of a prediction in addition to the paper's settings."""

    options: CostOptions = field(default_factory=CostOptions)
    ends: int = 1
    first_stage_disappears: bool = False
    """The paper's lower bound of the first stage: all is frozen and the backward is gone."""

    def bounds(self, bounds: Mapping[Action, Bounds]) -> dict[Action, Bounds]:
        gone = self.first_stage_disappears
        return {a: Bounds(0.0, b.upper) if gone and a.stage == 0 and a.freezable else b for a, b in bounds.items()}
