"""Stages of a LlamaForCausalLM of Hugging Face transformers, as torch.distributed.pipelining wants them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from transformers import LlamaForCausalLM


class LlamaStage(nn.Module):
    """Consecutive layers of a whole model, which it shares; every tensor keeps its name.

    The first stage turns tokens into hidden states, the last hidden states into logits.
    """

    def __init__(self, whole: LlamaForCausalLM, layers: range, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        self.is_first = layers.start == 0
        self.is_last = layers.stop == whole.config.num_hidden_layers
        self.model = nn.Module()
        self.model.rotary_emb = whole.model.rotary_emb
        self.model.layers = nn.ModuleDict({str(index): whole.model.layers[index] for index in layers})
        if self.is_first:
            self.model.embed_tokens = whole.model.embed_tokens
        if self.is_last:
            self.model.norm = whole.model.norm
            self.lm_head = whole.lm_head

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.model.embed_tokens(x) if self.is_first else x
            positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
            rotations = self.model.rotary_emb(hidden, positions)
            for layer in self.model.layers.values():
                hidden = layer(hidden, position_embeddings=rotations)  # causal, as nothing gives another mask
            return self.lm_head(self.model.norm(hidden)) if self.is_last else hidden


class Stage(PipelineStage):
    """A PipelineStage that evaluates in V-shaped schedules too.

    In their ``eval()`` torch 2.13 to 2.15 hands gradients from one stage of a rank to the other, and there are none.
    """

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy per token, in nats."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
