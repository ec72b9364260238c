"""What a run writes at its end is what its model would write alone, for every family, on every layout."""

from __future__ import annotations

import pytest
import torch

from tests.generate.models import CONFIGS, SEED, config_of, plan_of
from weft.comm.comm import Comm
from weft.models import FAMILIES
from weft.models.common.batch import chain, token_batch
from weft.prove.oracle import plain_model
from weft.testing import run_ranks
from weft.train.build import build_model
from weft.train.sample import sample

PROMPT, NUM_TOKENS, SEQ_LEN = (4, 9, 2), 8, 8


@pytest.mark.parametrize(
    ("family", "mesh"), [*((family, "") for family in CONFIGS), ("deepseek", "pp2 ep2"), ("llama3", "cp2 tp2")]
)
def test_sampled_text_is_the_plain_models(family: str, mesh: str):
    config = config_of(family)
    plan = plan_of(config, mesh).model_copy(update={"seq_len": SEQ_LEN})

    def rank(comm: Comm) -> list[int]:
        model = build_model(FAMILIES[family], config, plan, comm, seed=SEED)
        vocab = config.axis_sizes()["vocab"]
        return list(sample(model, PROMPT, vocab=vocab, num_tokens=NUM_TOKENS, temperature=0, seed=1))

    blocks = plain_model(FAMILIES[family], config, seed=SEED, dtype=torch.float64)
    kept = {name: block for name, block in blocks.items() if name != "loss" and not name.startswith("mtp")}
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        window = torch.tensor([tokens[-SEQ_LEN:]])
        with torch.no_grad():
            tokens.append(int(chain(kept, window, token_batch(window, window)).x[0, -1].argmax()))
    assert run_ranks(mesh, rank) == [tokens[len(PROMPT) :]] * plan.mesh.size
