"""The word language model of PyTorch's examples with an LSTM: a tied decoder, uniform initial values."""

from dataclasses import dataclass

import torch.nn as nn
import torch.nn.functional as F


@dataclass
class RNNConfig:
    ntoken: int = 256
    ninp: int = 24
    nhid: int = 24
    nlayers: int = 2
    rnn_type: str = "LSTM"
    dropout: float = 0.0
    tie_weights: bool = True


class RNNModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ntoken = c.ntoken
        self.drop = nn.Dropout(c.dropout)
        self.encoder = nn.Embedding(c.ntoken, c.ninp)
        if c.rnn_type in ["LSTM", "GRU"]:
            rnn = getattr(nn, c.rnn_type)
            self.rnn = rnn(c.ninp, c.nhid, c.nlayers, dropout=c.dropout, batch_first=True)  # weft
        else:
            nonlinearity = {"RNN_TANH": "tanh", "RNN_RELU": "relu"}[c.rnn_type]
            self.rnn = nn.RNN(
                c.ninp, c.nhid, c.nlayers, nonlinearity, dropout=c.dropout, batch_first=True
            )  # weft
        self.decoder = nn.Linear(c.nhid, c.ntoken)
        if c.tie_weights:
            if c.nhid != c.ninp:
                raise ValueError("When using the tied flag, nhid must be equal to emsize")
            self.decoder.weight = self.encoder.weight
        self.init_weights()
        self.rnn_type = c.rnn_type
        self.nhid = c.nhid
        self.nlayers = c.nlayers

    def init_weights(self):
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -initrange, initrange)

    def forward(self, input, hidden=None):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output)
        decoded = decoded.view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden


def train_loss(model, batch):
    output, hidden = model(batch["inputs"])
    return nn.NLLLoss()(output, batch["targets"].reshape(-1))


# weft

Config = RNNConfig
blocks = RNNModel


class Recurrent(nn.Module):
    def __init__(self, rnn, drop):
        super().__init__()
        self.rnn, self.drop = rnn, drop

    def forward(self, x):
        return self.drop(self.rnn(x)[0])


def blocks_of(net):
    encoder = nn.Sequential(net.encoder, net.drop)
    return {"encoder": encoder, "rnn": Recurrent(net.rnn, net.drop), "decoder": net.decoder}


def AXES(c):
    return {
        "encoder.0.weight": ("vocab", None),
        "rnn.rnn.weight*": (None, None),
        "rnn.rnn.bias*": (None,),
        "decoder.weight": ("vocab", None),
        "decoder.bias": ("vocab",),
    }
