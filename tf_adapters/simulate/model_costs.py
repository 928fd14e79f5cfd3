"""FLOPs of the stages of a Llama model: the planner's input if nothing can be measured.

Counted are matrix products, a multiply-add as two FLOPs. A product of activations with a weight costs the same
three times: forward, gradient of its input, gradient of its weight. Attention's products of activations with
activations have no weight: two forward, five backward (FlashAttention-2, section 4.1: the backward takes 2.5 times
the forward's FLOPs, one of its five products being the scores again). The embedding is a look-up, its gradient an
addition. Norms, rotary embedding, SiLU and the loss are below 1% of the FLOPs and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tf_adapters.schedule.durations import Bounds
from tf_adapters.schedule.ir import Action, Kind, PipelineSchedule

_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A Llama model's sizes, under the names of its published ``config.json``."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's seven weight matrices: q, o; k, v; gate, up, down."""
        keys = self.hidden_size // self.num_attention_heads * self.num_key_value_heads
        attention = 2 * self.hidden_size**2 + 2 * self.hidden_size * keys
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def embedding_weights(self) -> int:
        """Elements of the embedding; the head has as many."""
        return self.vocab_size * self.hidden_size


# config.json of meta-llama/Llama-3.2-1B, meta-llama/Meta-Llama-3-8B and meta-llama/Llama-2-13b-hf.
LLAMA_1B = LlamaShape(
    16, 2048, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192, vocab_size=128256
)
LLAMA_8B = LlamaShape(
    32, 4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=128256
)
LLAMA_13B = LlamaShape(
    40, 5120, num_attention_heads=40, num_key_value_heads=40, intermediate_size=13824, vocab_size=32000
)
SHAPES = {"llama-1b": LLAMA_1B, "llama-8b": LLAMA_8B, "llama-13b": LLAMA_13B}
"""Models by their names on the command line."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """FLOPs of one stage for one microbatch."""

    forward: float
    input_grad: float
    weight_grad: float

    def __add__(self, other: StageCost) -> StageCost:
        return StageCost(
            self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad
        )

    def scaled(self, factor: float) -> StageCost:
        """Return the cost times ``factor``."""
        return StageCost(self.forward * factor, self.input_grad * factor, self.weight_grad * factor)


def split_layers(layers: int, stages: int, ends: int = 1) -> tuple[int, ...]:
    """Return the number of layers of each stage if embedding and head count as ``ends`` layers each.

    First stages get the remainder. With ``ends=1`` this is TorchTitan's default (``generate_llm_fqn_per_model_part``),
    with 0 the even split. Raises ValueError when an end does not fit.
    """
    base, extra = divmod(layers + 2 * ends, stages)
    counts = [base + (stage < extra) for stage in range(stages)]
    counts[0] -= ends
    counts[-1] -= ends
    if min(counts) < 0:
        raise ValueError(f"{layers} layers on {stages} stages: too few for ends that count as {ends} layers")
    return tuple(counts)


def stage_costs(shape: LlamaShape, layers: Sequence[int], sequences: int, length: int) -> tuple[StageCost, ...]:
    """FLOPs by stage of a microbatch of ``sequences`` sequences of ``length`` tokens; ``layers`` by stage."""
    tokens = sequences * length
    layer = _layer(shape, tokens, length)
    costs = [layer.scaled(count) for count in layers]
    costs[0] += StageCost(0.0, 0.0, tokens * shape.hidden_size)
    head = 2.0 * tokens * shape.embedding_weights
    costs[-1] += StageCost(head, head, head)
    return tuple(costs)


def _layer(shape: LlamaShape, tokens: int, length: int) -> StageCost:
    """Return the cost of a layer. A causal kernel computes half of attention's scores."""
    linear = 2.0 * tokens * shape.layer_weights
    attention = 2.0 * tokens * length * shape.hidden_size
    return StageCost(linear + attention, linear + _ATTENTION_BACKWARD * attention, linear)


def action_bounds(schedule: PipelineSchedule, costs: Sequence[StageCost], flops_per_ms: float) -> dict[Action, Bounds]:
    """Return each action's time in ms, with everything and with nothing frozen.

    The first stage sends no input gradient. With random masks it still computes input gradients down to its first
    trained layer, so its lower bound contains them, as in a measurement. With split backwards torch computes nothing in
    the first stage's I and its whole backward in W (``_PipelineStageBase.backward_weight_one_chunk``, torch 2.13).
    """

    def bounds(action: Action) -> Bounds:
        cost, first = costs[action.stage], action.stage == 0
        if action.kind is Kind.FORWARD:
            return Bounds(cost.forward, cost.forward)
        if action.kind is Kind.INPUT_GRAD:
            return Bounds(0.0, 0.0) if first else Bounds(cost.input_grad, cost.input_grad)
        before = cost.input_grad if first or action.kind is Kind.BACKWARD else 0.0
        return Bounds(before, before + cost.weight_grad)

    flops = {action: bounds(action) for action in schedule.actions}
    return {a: Bounds(b.lower / flops_per_ms, b.upper / flops_per_ms) for a, b in flops.items()}
