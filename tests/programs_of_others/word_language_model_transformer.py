"""The word language model of PyTorch's examples: a subclass of nn.Transformer, a table of positions, a mask."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=128):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        pe = pe.unsqueeze(0)  # weft
        self.register_buffer("pe", pe)

    def forward(self, x):
        x = x + self.pe[:, : x.size(1)]  # weft
        return self.dropout(x)


@dataclass
class TransformerConfig:
    ntoken: int = 256
    ninp: int = 32
    nhead: int = 4
    nhid: int = 40
    nlayers: int = 2
    dropout: float = 0.0


class TransformerModel(nn.Transformer):
    def __init__(self, c):
        super().__init__(
            d_model=c.ninp,
            nhead=c.nhead,
            dim_feedforward=c.nhid,
            num_encoder_layers=c.nlayers,
            num_decoder_layers=0,
            dropout=c.dropout,
            batch_first=True,  # weft
        )
        self.model_type = "Transformer"
        self.src_mask = None
        self.pos_encoder = PositionalEncoding(c.ninp, c.dropout)
        self.input_emb = nn.Embedding(c.ntoken, c.ninp)
        self.ninp = c.ninp
        self.decoder = nn.Linear(c.ninp, c.ntoken)
        self.init_weights()

    def _generate_square_subsequent_mask(self, sz):
        return torch.log(torch.tril(torch.ones(sz, sz)))

    def init_weights(self):
        initrange = 0.1
        nn.init.uniform_(self.input_emb.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -initrange, initrange)

    def forward(self, src, has_mask=True):
        if has_mask:
            if self.src_mask is None or self.src_mask.size(0) != src.size(1):
                self.src_mask = self._generate_square_subsequent_mask(src.size(1)).to(src.device)
        else:
            self.src_mask = None
        src = self.input_emb(src) * math.sqrt(self.ninp)
        src = self.pos_encoder(src)
        output = self.encoder(src, mask=self.src_mask.to(src.dtype))
        output = self.decoder(output)
        return F.log_softmax(output, dim=-1)


def train_loss(model, batch):
    output = model(batch["inputs"])
    return nn.NLLLoss()(output.flatten(0, 1), batch["targets"].flatten())


# weft

Config = TransformerConfig
blocks = TransformerModel


class Embed(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.input_emb, self.pos_encoder, self.scale = (
            net.input_emb,
            net.pos_encoder,
            math.sqrt(net.ninp),
        )

    def forward(self, src):
        return self.pos_encoder(self.input_emb(src) * self.scale)


class Layer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        size = x.size(1)
        mask = torch.log(torch.tril(torch.ones(size, size, dtype=x.dtype, device=x.device)))
        return self.layer(x, src_mask=mask)


def blocks_of(net):
    layers = {f"layer{i}": Layer(layer) for i, layer in enumerate(net.encoder.layers)}
    return {"embed": Embed(net), **layers, "head": nn.Sequential(net.encoder.norm, net.decoder)}


AXES = {
    "embed.input_emb.weight": ("vocab", None),
    "layer*.self_attn.in_proj_weight": (None, None),
    "layer*.self_attn.in_proj_bias": (None,),
    "layer*.self_attn.out_proj.weight": (None, None),
    "layer*.self_attn.out_proj.bias": (None,),
    "layer*.linear1.weight": ("ffn", None),
    "layer*.linear1.bias": ("ffn",),
    "layer*.linear2.weight": (None, "ffn"),
    "layer*.linear2.bias": (None,),
    "layer*.norm?.*": (None,),
    "head.0.*": (None,),
    "head.1.weight": ("vocab", None),
    "head.1.bias": ("vocab",),
}
