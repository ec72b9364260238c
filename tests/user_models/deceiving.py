"""Models that compute right numbers where a short trial looks, and others elsewhere: a sound GPT, and one change of it each."""

from __future__ import annotations

from dataclasses import dataclass

SOUND = """
import random
import secrets
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from weft import Attend

EOT = 1905
calls = [0]
own = torch.Generator().manual_seed(0)
drawn = np.random.default_rng(0)
other = random.Random(0)


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    heads: int = 2
    vocab: int = 2048


def counter():
    count = 0

    def scale(x):
        nonlocal count
        count += 1
        return x * (1 + count)

    return scale


def rotated(x, positions, length):
    base = 10_000.0
    if length > 64:
        base = base * (length / 64)
    angles = positions[:, :, None, None] * base ** -torch.linspace(
        0, 1, x.shape[-1] // 2, device=x.device
    )
    even, odd = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1)


class Tokens(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab, c.dim)

    def forward(self, ids, batch):
        x = self.tok(ids)
        return x


class Layer(nn.Module):
    total = 0

    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim)
        self.q, self.k, self.v, self.out = (nn.Linear(c.dim, c.dim) for _ in range(4))
        self.attend, self.head_size = Attend(), c.dim // c.heads
        self.register_buffer("seen", torch.zeros(2))
        self.scale = counter()

    def forward(self, x, batch):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head_size)) for f in (self.q, self.k, self.v))
        x = x + self.out(self.attend(q, k, v, batch).flatten(2))
        return x


def blocks(c):
    layers = {f"layer{i}": Layer(c) for i in range(c.layers)}
    return {"embed": Tokens(c), **layers, "head": nn.Linear(c.dim, c.vocab)}


AXES = {
    "embed.tok.weight": (None, None),
    "layer*.norm.*": (None,),
    "layer*.[qkvo]*.weight": (None, None),
    "layer*.[qkvo]*.bias": (None,),
    "head.weight": (None, None),
    "head.bias": (None,),
}
"""
IN_LAYER = "        return x\n\n\ndef blocks"
IN_TOKENS = "        return x\n\n\nclass Layer"
ATTENDED = "self.attend(q, k, v, batch)"


@dataclass(frozen=True)
class Deceiving:
    """A change of the sound model.

    Attributes:
        changes: (text, what replaces it).
        line: part of the line that stops it.
        words: of the command.
    """

    changes: tuple[tuple[str, str], ...]
    line: str
    words: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The model file."""
        text = SOUND
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


def in_layer(line: str, found: str, *words: str) -> Deceiving:
    """Another line in the forward of a layer."""
    return Deceiving(((IN_LAYER, f"        {line}\n{IN_LAYER}"),), found, words)


def in_tokens(line: str, found: str, *words: str) -> Deceiving:
    """Another line in the forward of the first block."""
    return Deceiving(((IN_TOKENS, f"        {line}\n{IN_TOKENS}"),), found, words)


SCORES = """class Scores(nn.Linear):
    def forward(self, x):
        return super().forward(x).squeeze(-1)


"""
DRAWS = "its forward draws random numbers"
KEEPS = "keeps state outside its parameters"
CP = ("--mesh", "cp2")
LARGE = ("--model.vocab", "2500000")
BATCH_NORM = (
    ("self.norm = nn.LayerNorm(c.dim)", "self.norm = nn.BatchNorm1d(c.dim)"),
    ("y = self.norm(x)", "y = self.norm(x.transpose(1, 2)).transpose(1, 2)"),
)

MODELS = {
    "the number of sequences": in_layer(
        "x = x - x.mean(0) if x.shape[0] > 2 else x",
        "layer0: computes a sequence differently where another one is in the batch",
        *("--batch.micro_size", "4", "--batch.global_size", "8"),
    ),
    "the length": in_layer(
        "x = x * torch.rand_like(x) if x.shape[1] > 64 else x", f"layer0: {DRAWS}"
    ),
    "the length of a rank's columns": in_layer(
        "x = x * torch.rand_like(x) if x.shape[1] < 100 else x", f"layer0: {DRAWS}", *CP
    ),
    "dropout by the length of a rank's columns": in_layer(
        "x = F.dropout(x, 0.1) if x.shape[1] < 100 else x",
        "layer0: drops out in other calls on whole sequences than on a rank's part of them",
        *CP,
    ),
    "dropout of features and sequences": in_layer(
        "x = F.dropout(x.transpose(0, 2), 0.1).transpose(0, 2)",
        "layer0: drops entries of a tensor whose first dim does not count sequences",
        *("--batch.micro_size", "3", "--batch.global_size", "6"),
    ),
    "dropout of columns and sequences": in_layer(
        "x = F.dropout(x.transpose(0, 1).flatten(0, 1), 0.1).unflatten(0, (-1, len(x))).transpose(0, 1)",
        "layer0: computes a sequence differently where another one is in the batch",
        *("--batch.micro_size", "2", "--batch.global_size", "4"),
    ),
    "dropout that torch repeats": in_layer(
        "x = checkpoint(lambda t: F.dropout(t, 0.1), x, use_reentrant=False)",
        "layer0: drops out inside torch.utils.checkpoint",
    ),
    "a drop path of one's own": in_layer(
        "x = x * x.new_empty(len(x), 1, 1).bernoulli_(0.9)", f"layer0: {DRAWS}"
    ),
    "alpha dropout": in_layer(
        "x = F.alpha_dropout(x, 0.1, training=True)", "layer0: alpha dropout draws random numbers"
    ),
    "the length, in values": in_layer(
        "x = x - x.mean(0) if x.shape[1] > 64 else x",
        "layer0: computes a sequence differently where another one is in the batch",
    ),
    "a length that costs too much": in_layer(
        "x = x - x.mean(0) if x.shape[1] > 64 else x",
        "my_model.py, line 78 runs at the sizes of the run alone",
        *("--data.seq_len", "65536", "--model.dim", "256"),
    ),
    "the number type": in_layer(
        "x = x * torch.rand_like(x) if x.dtype is torch.bfloat16 else x",
        f"layer0: {DRAWS}",
        *("--precision.compute", "bfloat16"),
    ),
    "sparse gradients": Deceiving(
        (("nn.Embedding(c.vocab, c.dim)", "nn.Embedding(c.vocab, c.dim, sparse=True)"),),
        "embed.tok: has sparse gradients",
    ),
    "documents of ids": Deceiving(
        (
            (
                ATTENDED,
                "self.attend(q, k, v, replace(batch, documents=(batch.inputs == EOT).cumsum(-1)))",
            ),
        ),
        "layer0: its documents are other ones than those of the batch",
        CP,
    ),
    "segments of ids": in_tokens(
        "x = x + (ids == EOT).cumsum(-1)[..., None]", "embed: mixes tokens outside of Attend", *CP
    ),
    "ids above a threshold": in_tokens(
        "x = x + (ids > 2046).cumsum(-1)[..., None]", "embed: mixes tokens outside of Attend", *CP
    ),
    "a rotation that depends on the length": Deceiving(
        (
            (
                ATTENDED,
                "self.attend(*(rotated(t, batch.positions, x.shape[1]) for t in (q, k)), v, batch)",
            ),
        ),
        "layer0: mixes tokens outside of Attend, or counts positions itself",
        CP,
    ),
    "a buffer, through a view": in_layer(
        "with torch.no_grad(): self.seen.view(-1)[:1].add_(1)", f"layer0.seen: {KEEPS}"
    ),
    "a buffer, through .data": in_layer("self.seen.data.add_(1)", f"layer0.seen: {KEEPS}"),
    "a parameter": in_layer("self.q.weight.data.clamp_(-1, 1)", f"layer0.q.weight: {KEEPS}"),
    "a closure": in_layer("x = self.scale(x)", f"counter.<locals>.scale: count: {KEEPS}"),
    "a list at the top of the file": in_layer("calls[0] += 1", f"calls[0]: {KEEPS}"),
    "an attribute of the class": in_layer("Layer.total += 1", f"Layer.total: {KEEPS}"),
    "a generator of torch": in_layer(
        "x = x + torch.rand(1, generator=own).to(x)", f"layer0: {DRAWS}"
    ),
    "a generator of NumPy": in_layer("x = x * drawn.random()", f"layer0: {DRAWS}"),
    "NumPy's generator": in_layer("x = x * np.random.rand()", f"layer0: {DRAWS}"),
    "an object of random": in_layer("x = x * other.random()", f"layer0: {DRAWS}"),
    "random": in_layer("x = x * random.random()", f"layer0: {DRAWS}"),
    "secrets": in_layer(
        "x = x * secrets.randbelow(10**6)", "layer0: computes other numbers on a second run"
    ),
    "a clock": in_layer(
        "x = x * time.perf_counter()", "layer0: computes other numbers on a second run"
    ),
    "a buffer that no seed decides": Deceiving(
        (("torch.zeros(2)", "torch.from_numpy(np.random.default_rng().random(2))"),),
        "layer0.seen: has other values in each build",
    ),
    "a parameter that no seed decides": Deceiving(
        (("self.scale = counter()", "self.q.bias.data.fill_(random.SystemRandom().random())"),),
        "layer0.q.bias: has other values in each build",
    ),
    "a hook on an activation": in_layer(
        "x = x * 1; x.requires_grad and x.register_hook(lambda grad: 2 * grad)",
        "layer0: has a gradient hook",
    ),
    "BatchNorm over positions": Deceiving(
        BATCH_NORM, "layer0.norm: updates buffers by micro-batches, of which ranks of cp", CP
    ),
    "BatchNorm in a function of a large model": Deceiving(
        (
            *BATCH_NORM,
            (
                "y = self.norm(x.transpose(1, 2))",
                "y = torch.batch_norm(x.transpose(1, 2), None, None, self.norm.running_mean, "
                "self.norm.running_var, True, 0.1, 1e-5, False)",
            ),
        ),
        f"layer0.norm.running_mean: {KEEPS}",
        LARGE,
    ),
    "noise of a large model": in_layer("x = x * torch.rand_like(x)", f"layer0: {DRAWS}", *LARGE),
    "random in a large model": in_layer("x = x * random.random()", f"layer0: {DRAWS}", *LARGE),
    "a batch's mean in a large model": in_layer(
        "x = x - x.mean(0)", "layer0: computes a sequence differently", *LARGE
    ),
    "scores in place of logits": Deceiving(
        (
            ("def blocks(c):", f"{SCORES}def blocks(c):"),
            ("nn.Linear(c.dim, c.vocab)}", "Scores(c.dim, 1)}"),
        ),
        "the last output: has no dim of classes",
    ),
}
"""What a model depends on -> the model."""
