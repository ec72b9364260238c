"""Whisper: convolutions as stem, subclasses of LayerNorm that cast, cross-attention, logits by the embedding."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from weft import InputSpec  # weft


@dataclass
class ModelDimensions:
    n_mels: int = 8
    n_audio_ctx: int = 12
    n_audio_state: int = 32
    n_audio_head: int = 4
    n_audio_layer: int = 2
    n_vocab: int = 51
    n_text_ctx: int = 10
    n_text_state: int = 32
    n_text_head: int = 4
    n_text_layer: int = 2


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x).type(x.dtype)


class Linear(nn.Linear):
    pass  # weft: a forward of its own cast the weight to the type of x


class Conv1d(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(
            x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        )


def sinusoids(length, channels, max_timescale=10000):
    assert channels % 2 == 0
    log_timescale_increment = np.log(max_timescale) / (channels // 2 - 1)
    inv_timescales = torch.exp(-log_timescale_increment * torch.arange(channels // 2))
    scaled_time = torch.arange(length)[:, np.newaxis] * inv_timescales[np.newaxis, :]
    return torch.cat([torch.sin(scaled_time), torch.cos(scaled_time)], dim=1)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.head_dim = n_state // n_head  # weft
        self.query = Linear(n_state, n_state)
        self.key = Linear(n_state, n_state, bias=False)
        self.value = Linear(n_state, n_state)
        self.out = Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None):
        q = self.query(x)
        k = self.key(x if xa is None else xa)
        v = self.value(x if xa is None else xa)
        wv = self.qkv_attention(q, k, v, mask)
        return self.out(wv)

    def qkv_attention(self, q, k, v, mask=None):
        n_ctx = q.shape[1]
        scale = self.head_dim**-0.25  # weft
        q = q.view(*q.shape[:2], -1, self.head_dim).permute(0, 2, 1, 3)  # weft
        k = k.view(*k.shape[:2], -1, self.head_dim).permute(0, 2, 1, 3)  # weft
        v = v.view(*v.shape[:2], -1, self.head_dim).permute(0, 2, 1, 3)  # weft
        qk = (q * scale) @ (k * scale).transpose(-1, -2)
        if mask is not None:
            qk = qk + mask[:n_ctx, :n_ctx]
        w = F.softmax(qk, dim=-1).to(q.dtype)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state, n_head, cross_attention=False):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        self.attn_ln = LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head) if cross_attention else None
        self.cross_attn_ln = LayerNorm(n_state) if cross_attention else None
        n_mlp = n_state * 4
        self.mlp = nn.Sequential(Linear(n_state, n_mlp), nn.GELU(), Linear(n_mlp, n_state))
        self.mlp_ln = LayerNorm(n_state)

    def forward(self, x, xa=None, mask=None):
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa)
        return x + self.mlp(self.mlp_ln(x))


class AudioEncoder(nn.Module):
    def __init__(self, n_mels, n_ctx, n_state, n_head, n_layer):
        super().__init__()
        self.conv1 = Conv1d(n_mels, n_state, kernel_size=3, padding=1)
        self.conv2 = Conv1d(n_state, n_state, kernel_size=3, stride=2, padding=1)
        self.register_buffer("positional_embedding", sinusoids(n_ctx, n_state))
        self.blocks = nn.ModuleList(
            [ResidualAttentionBlock(n_state, n_head) for _ in range(n_layer)]
        )
        self.ln_post = LayerNorm(n_state)

    def stem(self, x):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        x = x.permute(0, 2, 1)
        assert x.shape[1:] == self.positional_embedding.shape, "incorrect audio shape"
        return (x + self.positional_embedding).to(x.dtype)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class TextDecoder(nn.Module):
    def __init__(self, n_vocab, n_ctx, n_state, n_head, n_layer):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(n_ctx, n_state))
        self.blocks = nn.ModuleList(
            [ResidualAttentionBlock(n_state, n_head, cross_attention=True) for _ in range(n_layer)]
        )
        self.ln = LayerNorm(n_state)
        mask = torch.empty(n_ctx, n_ctx).fill_(-np.inf).triu_(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x, xa):
        x = self.token_embedding(x) + self.positional_embedding[: x.shape[-1]]
        x = x.to(xa.dtype)
        for block in self.blocks:
            x = block(x, xa, mask=self.mask)
        x = self.ln(x)
        return x @ torch.transpose(self.token_embedding.weight.to(x.dtype), 0, 1)


class Whisper(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = dims
        self.encoder = AudioEncoder(
            dims.n_mels, dims.n_audio_ctx, dims.n_audio_state, dims.n_audio_head, dims.n_audio_layer
        )
        self.decoder = TextDecoder(
            dims.n_vocab, dims.n_text_ctx, dims.n_text_state, dims.n_text_head, dims.n_text_layer
        )

    def forward(self, mel, tokens):
        return self.decoder(tokens, self.encoder(mel))


def train_loss(model, batch):
    logits = model(batch["mel"], batch["tokens"])
    return F.cross_entropy(logits.transpose(1, 2), batch["targets"], ignore_index=-100)


# weft

Config = ModelDimensions
blocks = Whisper


def INPUTS(dims):
    tokens = InputSpec((dims.n_text_ctx,), "int64", below=dims.n_vocab)
    mel = InputSpec((dims.n_mels, 2 * dims.n_audio_ctx))
    return {"mel": mel, "tokens": tokens, "targets": tokens}


class Stem(nn.Module):
    stem = AudioEncoder.stem

    def __init__(self, encoder):
        super().__init__()
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2
        self.register_buffer("positional_embedding", encoder.positional_embedding)

    def forward(self, mel):
        return self.stem(mel.to(self.conv1.weight.dtype))


class Text(nn.Module):
    def __init__(self, whisper):
        super().__init__()
        self.ln_post = whisper.encoder.ln_post
        self.token_embedding = whisper.decoder.token_embedding
        self.positional_embedding = whisper.decoder.positional_embedding

    def forward(self, xa, batch):
        x = self.token_embedding(batch.fields["tokens"]) + self.positional_embedding
        return x, self.ln_post(xa)


class DecoderLayer(nn.Module):
    def __init__(self, block, mask):
        super().__init__()
        self.block = block
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, both):
        x, xa = both
        return self.block(x, xa, mask=self.mask), xa


class Head(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.ln, self.token_embedding = decoder.ln, decoder.token_embedding

    def forward(self, both):
        return self.ln(both[0]) @ torch.transpose(self.token_embedding.weight, 0, 1)


def blocks_of(whisper):
    decoder = whisper.decoder
    encoders = {f"encoder{i}": block for i, block in enumerate(whisper.encoder.blocks)}
    decoders = {
        f"decoder{i}": DecoderLayer(block, decoder.mask) for i, block in enumerate(decoder.blocks)
    }
    return {
        "stem": Stem(whisper.encoder),
        **encoders,
        "text": Text(whisper),
        **decoders,
        "head": Head(decoder),
    }


AXES = {
    "stem.conv?.weight": (None, None, None),
    "stem.conv?.bias": (None,),
    "text.ln_post.*": (None,),
    "text.token_embedding.weight": (None, None),
    "text.positional_embedding": (None, None),
    "*.*ln.*": (None,),
    "*.query.weight": ("heads", None),
    "*.query.bias": ("heads",),
    "*.key.weight": ("heads", None),
    "*.value.weight": ("heads", None),
    "*.value.bias": ("heads",),
    "*.out.weight": (None, "heads"),
    "*.out.bias": (None,),
    "*.mlp.0.weight": ("ffn", None),
    "*.mlp.0.bias": ("ffn",),
    "*.mlp.2.weight": (None, "ffn"),
    "*.mlp.2.bias": (None,),
}
