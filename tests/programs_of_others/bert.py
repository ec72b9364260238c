"""BERT: masked tokens and next sentence, segments, a pooler, a decoder tied to the embedding with its own bias."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from weft import InputSpec  # weft


@dataclass
class BertConfig:
    vocab_size: int = 61
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 56
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 16
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    length: int = 14


class BertEmbeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.register_buffer(
            "position_ids", torch.arange(config.max_position_embeddings).expand((1, -1))
        )

    def forward(self, input_ids, token_type_ids):
        seq_length = input_ids.size(1)
        position_ids = self.position_ids[:, :seq_length]
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings += self.position_embeddings(position_ids)
        embeddings = self.LayerNorm(embeddings)
        return self.dropout(embeddings)


class BertSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = int(config.hidden_size / config.num_attention_heads)
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def transpose_for_scores(self, x):
        new_x_shape = x.size()[:-1] + (-1, self.attention_head_size)  # weft
        x = x.view(new_x_shape)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        attention_scores = attention_scores + attention_mask
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        attention_probs = self.dropout(attention_probs)
        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        return context_layer.view(context_layer.size()[:-2] + (-1,))  # weft


class BertSelfOutput(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


class BertAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertSelfOutput(config)

    def forward(self, hidden_states, attention_mask):
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


class BertIntermediate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = nn.functional.gelu

    def forward(self, hidden_states):
        return self.intermediate_act_fn(self.dense(hidden_states))


class BertOutput(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


class BertLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attention_output), attention_output)


class BertPooler(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states):
        first_token_tensor = hidden_states[:, 0]
        return self.activation(self.dense(first_token_tensor))


class BertLMPredictionHead(nn.Module):
    def __init__(self, config, embedding_weights):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.decoder.weight = embedding_weights
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states):
        hidden_states = self.LayerNorm(F.gelu(self.dense(hidden_states)))
        return self.decoder(hidden_states) + self.bias


class BertForPreTraining(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = nn.ModuleList([BertLayer(config) for _ in range(config.num_hidden_layers)])
        self.pooler = BertPooler(config)
        self.predictions = BertLMPredictionHead(config, self.embeddings.word_embeddings.weight)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
        self.apply(self.init_bert_weights)

    def init_bert_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def forward(self, input_ids, token_type_ids, attention_mask):
        hidden_states = self.embeddings(input_ids, token_type_ids)
        mask = extended_attention_mask(attention_mask, hidden_states.dtype)
        for layer_module in self.encoder:
            hidden_states = layer_module(hidden_states, mask)
        pooled_output = self.pooler(hidden_states)
        return self.predictions(hidden_states), self.seq_relationship(pooled_output)


def extended_attention_mask(attention_mask, dtype):
    extended = attention_mask.unsqueeze(1).unsqueeze(2).to(dtype=dtype)
    return (1.0 - extended) * -10000.0


def train_loss(model, batch):
    scores, relation = model(batch["input_ids"], batch["segments"], batch["attention_mask"])
    masked_lm_loss = F.cross_entropy(scores.flatten(0, 1), batch["masked_labels"].flatten())
    next_sentence_loss = F.cross_entropy(relation, batch["is_next"])
    return masked_lm_loss + next_sentence_loss


# weft

Config = BertConfig
blocks = BertForPreTraining


def INPUTS(c):
    tokens = InputSpec((c.length,), "int64", below=c.vocab_size)
    return {
        "input_ids": tokens,
        "segments": InputSpec((c.length,), "int64", below=c.type_vocab_size),
        "attention_mask": InputSpec((c.length,), "bool"),
        "masked_labels": tokens,
        "is_next": InputSpec((), "int64", below=2),
    }


class Embed(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, input_ids, batch):
        return self.embeddings(input_ids, batch.fields["segments"])


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, batch):
        return self.layer(x, extended_attention_mask(batch.fields["attention_mask"], x.dtype))


class Loss(nn.Module):
    def __init__(self, bert):
        super().__init__()
        self.pooler, self.predictions = bert.pooler, bert.predictions
        self.seq_relationship = bert.seq_relationship

    def forward(self, x, batch):
        labels = batch.fields["masked_labels"]
        scores, relation = self.predictions(x), self.seq_relationship(self.pooler(x))
        masked_lm_loss = (
            F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
            / labels.shape[1]
        )
        return masked_lm_loss + F.cross_entropy(relation, batch.fields["is_next"], reduction="sum")


def blocks_of(bert):
    layers = {f"layer{i}": Layer(layer) for i, layer in enumerate(bert.encoder)}
    return {"embed": Embed(bert.embeddings), **layers, "loss": Loss(bert)}


AXES = {
    "embed.*_embeddings.weight": (None, None),
    "embed.*LayerNorm.*": (None,),
    "layer*.attention.self.*.weight": ("heads", None),
    "layer*.attention.self.*.bias": ("heads",),
    "layer*.attention.output.dense.weight": (None, "heads"),
    "layer*.intermediate.dense.weight": ("ffn", None),
    "layer*.intermediate.dense.bias": ("ffn",),
    "layer*.layer.output.dense.weight": (None, "ffn"),
    "layer*.output.dense.bias": (None,),
    "layer*.LayerNorm.*": (None,),
    "loss.*dense.weight": (None, None),
    "loss.*dense.bias": (None,),
    "loss.predictions.LayerNorm.*": (None,),
    "loss.predictions.bias": (None,),
    "loss.seq_relationship.weight": (None, None),
    "loss.seq_relationship.bias": (None,),
}
