"""T5: relative positions of the first layer for all layers, no scale of scores, RMS norms, scaled logits."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from weft import InputSpec  # weft


@dataclass
class T5Config:
    vocab_size: int = 60
    d_model: int = 32
    d_kv: int = 8
    d_ff: int = 48
    num_layers: int = 2
    num_heads: int = 4
    relative_attention_num_buckets: int = 8
    relative_attention_max_distance: int = 16
    dropout_rate: float = 0.0
    tie_word_embeddings: bool = True
    source: int = 12
    target: int = 8


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states


class T5DenseGatedActDense(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden_states):
        hidden_gelu = self.act(self.wi_0(hidden_states))
        hidden_linear = self.wi_1(hidden_states)
        hidden_states = hidden_gelu * hidden_linear
        hidden_states = self.dropout(hidden_states)
        return self.wo(hidden_states)


class T5LayerFF(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.DenseReluDense = T5DenseGatedActDense(config)
        self.layer_norm = T5LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, hidden_states):
        forwarded_states = self.DenseReluDense(self.layer_norm(hidden_states))
        return hidden_states + self.dropout(forwarded_states)


class T5Attention(nn.Module):
    def __init__(self, config, has_relative_attention_bias=False, bidirectional=True):
        super().__init__()
        self.bidirectional = bidirectional
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.key_value_proj_dim = config.d_kv
        self.n_heads = config.num_heads
        self.dropout = config.dropout_rate
        self.inner_dim = self.n_heads * self.key_value_proj_dim
        self.q = nn.Linear(config.d_model, self.inner_dim, bias=False)
        self.k = nn.Linear(config.d_model, self.inner_dim, bias=False)
        self.v = nn.Linear(config.d_model, self.inner_dim, bias=False)
        self.o = nn.Linear(self.inner_dim, config.d_model, bias=False)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(self.num_buckets, self.n_heads)

    def _relative_position_bucket(self, relative_position):
        num_buckets, relative_buckets = self.num_buckets, 0
        if self.bidirectional:
            num_buckets //= 2
            relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
            relative_position = torch.abs(relative_position)
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact
        large = torch.log(relative_position.clamp(min=1).float() / max_exact)
        large = large / math.log(self.max_distance / max_exact) * (num_buckets - max_exact)
        large = torch.clamp(max_exact + large.to(torch.long), max=num_buckets - 1)
        relative_buckets += torch.where(is_small, relative_position, large)
        return relative_buckets

    def compute_bias(self, query_length, key_length, device):
        context_position = torch.arange(query_length, dtype=torch.long, device=device)[:, None]
        memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
        relative_position_bucket = self._relative_position_bucket(
            memory_position - context_position
        )
        values = self.relative_attention_bias(relative_position_bucket)
        return values.permute([2, 0, 1]).unsqueeze(0)

    def forward(self, hidden_states, mask=None, key_value_states=None, position_bias=None):
        batch_size, seq_length = hidden_states.shape[:2]
        current_states = hidden_states if key_value_states is None else key_value_states

        def shape(states):
            return states.unflatten(2, (-1, self.key_value_proj_dim)).transpose(1, 2)  # weft

        query_states = shape(self.q(hidden_states))
        key_states, value_states = shape(self.k(current_states)), shape(self.v(current_states))
        scores = torch.matmul(query_states, key_states.transpose(3, 2))
        if position_bias is None:
            key_length = key_states.shape[-2]
            if hasattr(self, "relative_attention_bias"):
                position_bias = self.compute_bias(seq_length, key_length, hidden_states.device)
            else:
                position_bias = torch.zeros_like(scores)  # weft
            if mask is not None:
                position_bias = position_bias + mask
        scores = scores + position_bias
        attn_weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        attn_weights = F.dropout(attn_weights, p=self.dropout, training=self.training)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).flatten(2)  # weft
        return self.o(attn_output), position_bias


class T5Block(nn.Module):
    def __init__(self, config, is_decoder, has_relative_attention_bias):
        super().__init__()
        self.is_decoder = is_decoder
        self.SelfAttention = T5Attention(
            config, has_relative_attention_bias, bidirectional=not is_decoder
        )
        self.self_norm = T5LayerNorm(config.d_model)
        if is_decoder:
            self.EncDecAttention = T5Attention(config)
            self.cross_norm = T5LayerNorm(config.d_model)
        self.ff = T5LayerFF(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, hidden_states, mask, position_bias=None, encoded=None, encoder_mask=None):
        out, position_bias = self.SelfAttention(
            self.self_norm(hidden_states), mask, None, position_bias
        )
        hidden_states = hidden_states + self.dropout(out)
        if self.is_decoder:
            out, _ = self.EncDecAttention(self.cross_norm(hidden_states), encoder_mask, encoded)
            hidden_states = hidden_states + self.dropout(out)
        return self.ff(hidden_states), position_bias


class T5Stack(nn.Module):
    def __init__(self, config, embed_tokens, is_decoder=False):
        super().__init__()
        self.embed_tokens = embed_tokens
        self.is_decoder = is_decoder
        self.block = nn.ModuleList(
            [
                T5Block(config, is_decoder, has_relative_attention_bias=i == 0)
                for i in range(config.num_layers)
            ]
        )
        self.final_layer_norm = T5LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, input_ids, mask, encoded=None, encoder_mask=None):
        hidden_states = self.dropout(self.embed_tokens(input_ids))
        position_bias = None
        for layer_module in self.block:
            hidden_states, position_bias = layer_module(
                hidden_states, mask, position_bias, encoded, encoder_mask
            )
        return self.dropout(self.final_layer_norm(hidden_states))


def extended_mask(mask, dtype):
    return (1.0 - mask[:, None, None, :].to(dtype)) * -1e9


def causal_mask(length, device, dtype):
    ids = torch.arange(length, device=device)
    return (1.0 - (ids[None, :] <= ids[:, None]).to(dtype))[None, None] * -1e9


class T5ForConditionalGeneration(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model_dim = config.d_model
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config, self.shared)
        self.decoder = T5Stack(config, self.shared, is_decoder=True)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.shared.weight

    def _shift_right(self, labels):
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        shifted.masked_fill_(shifted == -100, 0)
        return shifted

    def forward(self, input_ids, attention_mask, labels):
        dtype = self.shared.weight.dtype
        encoder_mask = extended_mask(attention_mask, dtype)
        encoded = self.encoder(input_ids, encoder_mask)
        decoder_input_ids = self._shift_right(labels)
        mask = causal_mask(labels.shape[1], labels.device, dtype)
        sequence_output = self.decoder(decoder_input_ids, mask, encoded, encoder_mask)
        if self.config.tie_word_embeddings:
            sequence_output = sequence_output * (self.model_dim**-0.5)
        lm_logits = self.lm_head(sequence_output)
        return F.cross_entropy(
            lm_logits.view(-1, lm_logits.size(-1)), labels.view(-1), ignore_index=-100
        )


def train_loss(model, batch):
    return model(batch["input_ids"], batch["attention_mask"], batch["targets"])


# weft

Config = T5Config
blocks = T5ForConditionalGeneration


def INPUTS(c):
    return {
        "input_ids": InputSpec((c.source,), "int64", below=c.vocab_size),
        "attention_mask": InputSpec((c.source,), "bool"),
        "targets": InputSpec((c.target,), "int64", below=c.vocab_size),
    }


class Embed(nn.Module):
    def __init__(self, stack):
        super().__init__()
        self.embed_tokens, self.dropout = stack.embed_tokens, stack.dropout

    def forward(self, input_ids):
        return self.dropout(self.embed_tokens(input_ids))


class EncoderLayer(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, batch):
        hidden_states, bias = x if isinstance(x, tuple) else (x, None)
        mask = extended_mask(batch.fields["attention_mask"], hidden_states.dtype)
        hidden_states, bias = self.block(hidden_states, mask, bias)
        return hidden_states, bias.expand(len(hidden_states), -1, -1, -1)


class Before(nn.Module):
    def __init__(self, t5):
        super().__init__()
        self.final_layer_norm, self.dropout = t5.encoder.final_layer_norm, t5.encoder.dropout
        self.decoder = Embed(t5.decoder)

    def forward(self, x, batch):
        ids = T5ForConditionalGeneration._shift_right(self, batch.targets)
        return self.decoder(ids), self.dropout(self.final_layer_norm(x[0]))


class DecoderLayer(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, batch):
        hidden_states, encoded, *bias = x
        dtype = hidden_states.dtype
        mask = causal_mask(hidden_states.shape[1], hidden_states.device, dtype)
        encoder_mask = extended_mask(batch.fields["attention_mask"], dtype)
        bias = bias[0] if bias else None
        hidden_states, bias = self.block(hidden_states, mask, bias, encoded, encoder_mask)
        return hidden_states, encoded, bias.expand(len(hidden_states), -1, -1, -1)


class Head(nn.Module):
    def __init__(self, t5):
        super().__init__()
        self.final_layer_norm, self.dropout = t5.decoder.final_layer_norm, t5.decoder.dropout
        self.lm_head = t5.lm_head
        self.scale = t5.model_dim**-0.5 if t5.config.tie_word_embeddings else 1.0

    def forward(self, x):
        return self.lm_head(self.dropout(self.final_layer_norm(x[0])) * self.scale)


def blocks_of(t5):
    encoders = {f"encoder{i}": EncoderLayer(block) for i, block in enumerate(t5.encoder.block)}
    decoders = {f"decoder{i}": DecoderLayer(block) for i, block in enumerate(t5.decoder.block)}
    return {
        "embed": Embed(t5.encoder),
        **encoders,
        "before": Before(t5),
        **decoders,
        "head": Head(t5),
    }


AXES = {
    "*embed_tokens.weight": (None, None),
    "*.relative_attention_bias.weight": (None, "heads"),
    "*norm.weight": (None,),
    "*.[qkv].weight": ("heads", None),
    "*.o.weight": (None, "heads"),
    "*.wi_?.weight": ("ffn", None),
    "*.wo.weight": (None, "ffn"),
    "head.lm_head.weight": (None, None),
}
