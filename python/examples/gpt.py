"""A small GPT that really trains on real text, deterministically.

The text is the source of Python's standard library, byte by byte. A batch is a function of seed, step
and rank, so that a run which is resumed sees what a run straight through saw.
"""

from __future__ import annotations

import dataclasses
import functools
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256  # bytes
_TEXT_FILES = ("argparse.py", "ast.py", "dataclasses.py", "difflib.py", "inspect.py", "pickle.py",
               "tarfile.py", "typing.py")


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of a model and of its batches."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, context=32, batch=4),
    "gpt2": Size(layers=12, width=768, heads=12, context=256, batch=4),
    # With Adam's two moments 64 and 272 MiB of state, and a step that a single core does in a blink.
    "64MiB": Size(layers=7, width=256, heads=8, context=16, batch=1),
    "272MiB": Size(layers=7, width=528, heads=8, context=16, batch=1),
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.expand = nn.Linear(size.width, 4 * size.width)
        self.contract = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(0.1)  # the random state matters to what is resumed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.attention(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.contract(functional.gelu(self.expand(self.norm2(x)))))


class GPT(nn.Module):
    """A causal language model over bytes; output and input embeddings are tied."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.cache
def text() -> torch.Tensor:
    """The text's bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    data = b"".join((library / name).read_bytes() for name in _TEXT_FILES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Loader:
    """Batches by (seed, step, rank), with a state of its own, as data loaders have."""

    def __init__(self, size: Size, seed: int = 0, rank: int = 0) -> None:
        self.size = size
        self.seed = seed
        self.rank = rank
        self.step = 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed << 40 | self.rank << 32 | self.step)
        self.step += 1
        context = self.size.context
        starts = torch.randint(
            len(text()) - context - 1, (self.size.batch,), generator=generator
        ).tolist()
        rows = torch.stack([text()[s : s + context + 1] for s in starts]).long()
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.step = state["seed"], state["step"]


class Average:
    """An exponential moving average of a model's parameters: one more entry of the state."""

    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter, 1 - self.decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = state


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader) -> float:
    """One step; returns the loss."""
    inputs, targets = loader.batch()
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
