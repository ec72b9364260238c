"""torch.nn.TransformerEncoderLayer as the layers of a model that is one module; `blocks_of` names its blocks."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    heads: int = 4
    vocab: int = 256
    dropout: float = 0.1


class WholeModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab, c.dim)
        layer = nn.TransformerEncoderLayer(c.dim, c.heads, 32, c.dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, c.layers, enable_nested_tensor=False)
        self.out = nn.Linear(c.dim, c.vocab)

    def forward(self, ids):
        return self.out(self.encoder(self.tokens(ids)))


def blocks(c):
    return WholeModel(c)


def blocks_of(model):
    layers = {f"layer{i}": layer for i, layer in enumerate(model.encoder.layers)}
    return {"tokens": model.tokens, **layers, "out": model.out}


AXES = {
    "tokens.weight": ("vocab", "embed"),
    "layer*.self_attn.in_proj_weight": (None, "embed"),
    "layer*.self_attn.in_proj_bias": (None,),
    "layer*.self_attn.out_proj.weight": ("embed", None),
    "layer*.self_attn.out_proj.bias": ("embed",),
    "layer*.linear1.weight": ("ffn", "embed"),
    "layer*.linear1.bias": ("ffn",),
    "layer*.linear2.weight": ("embed", "ffn"),
    "layer*.linear2.bias": ("embed",),
    "layer*.norm[12].*": (None,),
    "out.weight": ("vocab", "embed"),
    "out.bias": ("vocab",),
}
