"""Greedy text equals that of Hugging Face's `generate`, token for token, in float64, with its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.generate.models import Generation, Memory, plan_of
from tests.oracle.hugging_face import ViewsOf, copy_into, our_blocks, shaken, tensors_of
from tests.oracle.test_huggingface import (
    GPT2,
    LLAMAS,
    gpt2_views,
    llama3_views,
    their_gpt2,
    their_llama3,
)
from weft.cli import main
from weft.core.model_config import ModelConfig
from weft.generate.decode import Decoder, load_model
from weft.models import FAMILIES
from weft.models.common.init import named_parameters
from weft.testing import run_ranks

PROMPTS = ((5, 17, 3, 99, 4), (8,), tuple(range(20)))
NUM_TOKENS = 20
CASES = {
    "gpt2": (GPT2, their_gpt2, gpt2_views),
    "llama3": (LLAMAS["untied"], their_llama3, llama3_views),
    "llama3 tied": (LLAMAS["tied"], their_llama3, llama3_views),
}


@pytest.mark.parametrize("mesh", ["", "tp2"])
@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_hugging_faces(name: str, mesh: str):
    torch.manual_seed(0)
    config, make, views = CASES[name]
    theirs = shaken(make(config).double()).eval()
    texts = [their_text(theirs, prompt) for prompt in PROMPTS]
    count = len({token for text in texts for token in text})
    assert count > 5, "the texts say something"
    for ours, _ in run_ranks(
        mesh,
        lambda comm: Generation(PROMPTS, NUM_TOKENS)(decoder(config, theirs, views, mesh, comm)),
    ):
        assert ours == texts


def their_text(model: nn.Module, prompt: tuple[int, ...]) -> list[int]:
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def decoder(config: ModelConfig, theirs: nn.Module, views: ViewsOf, mesh: str, comm) -> Decoder:
    """Their weights by our names, each rank its own pieces."""
    blocks = our_blocks(config)
    family = FAMILIES[config.family]
    copy_into(named_parameters(blocks), views(tensors_of(theirs), config))
    values = {name: param.detach() for name, param in named_parameters(blocks).items()}
    source = Memory(values)
    return Decoder(
        load_model(family, config, source, plan=plan_of(config, mesh), comm=comm),
        vocab=config.vocab,
    )


def test_a_hugging_face_folder_writes_what_its_model_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    torch.manual_seed(0)
    config = LLAMAS["untied"].model_copy(update={"vocab": 256})
    theirs = shaken(their_llama3(config)).eval()
    theirs.save_pretrained(tmp_path)
    right = their_text(theirs.double(), tuple(b"def f"))
    words = [
        "--prompt",
        "def f",
        "--tokenizer",
        "bytes",
        "--temperature",
        "0",
        "--tokens",
        str(NUM_TOKENS),
        "--json",
    ]
    for mesh in ("", "tp2"):
        layout = ["--mesh", mesh, "--dtype", "float64", "--transport", "threads"]
        actual = main(["generate", str(tmp_path), *words, *layout])
        assert actual == 0, capsys.readouterr().err
        result = json.loads(capsys.readouterr().out)
        end = right.index(2) if 2 in right else NUM_TOKENS - 1
        assert result["tokens"] == right[: end + 1], "eos_token_id 2 of config.json ends a text"
