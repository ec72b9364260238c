"""A small LLaMA with weights of a formula, its tokenizer, and records of every form, on which TRL and weft are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.data.chat_files import conversations, tokenizer_folder, write_jsonl

BETA = 0.3
DPO = f"--loss dpo --dpo.beta {BETA}"
LR = 1e-2
STEPS = 3
VOCAB = 288
WORDS = ("seven", "the cat sat", "hello to you é", "two plus two")


@dataclass(frozen=True)
class TrlCase:
    """One trainer of TRL on one file, and the same in weft.

    Attributes:
        trainer: beginning of the class names in TRL.
        values: fields of its configuration.
        words: of weft's command.
    """

    name: str
    file: str
    trainer: str
    values: Mapping[str, Any]
    words: str = ""


KTO = {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.75}
CASES = (
    TrlCase("sft", "chat", "SFT", {"assistant_only_loss": True}),
    TrlCase(
        "sft_packed",
        "chat",
        "SFT",
        {"assistant_only_loss": True, "packing": True},
        "--data.packing documents",
    ),
    TrlCase("sft_texts", "texts", "SFT", {}),
    TrlCase("dpo", "pairs", "DPO", {"beta": BETA}, DPO),
    TrlCase("dpo_texts", "text_pairs", "DPO", {"beta": BETA}, DPO),
    TrlCase(
        "ipo", "pairs", "DPO", {"beta": BETA, "loss_type": "ipo"}, f"{DPO} --dpo.loss_type ipo"
    ),
    TrlCase(
        "kto",
        "answers",
        "KTO",
        KTO,
        f"{DPO} --data.format unpaired --dpo.loss_type kto --dpo.desirable_weight 1.5"
        " --dpo.undesirable_weight 0.75",
    ),
    TrlCase("orpo", "pairs", "ORPO", {"beta": BETA}, f"{DPO} --dpo.loss_type orpo"),
    TrlCase("orpo_texts", "text_pairs", "ORPO", {"beta": BETA}, f"{DPO} --dpo.loss_type orpo"),
)


def model_folder(folder: Path) -> Path:
    """The folder of the model, with the records beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).double()
    with torch.no_grad():
        for number, (name, param) in enumerate(model.named_parameters()):
            if "norm" not in name:
                entries = torch.arange(param.numel(), dtype=torch.float64)
                param.copy_(0.3 * torch.sin((1.7 + 0.01 * number) * entries**1.1).view_as(param))
    model.save_pretrained(folder)
    tokenizer_folder(folder)
    for name, records in records_of_files().items():
        write_jsonl(folder / f"{name}.jsonl", records)
    return folder


def records_of_files() -> dict[str, list[dict[str, Any]]]:
    """Name of a file -> its records. Prompts of texts end within a word, so that a token of the whole
    text may be of prompt and answer.
    """
    numbers = range(8)
    asked = [f"what is {'two ' * (number % 4)}plus five?" for number in numbers]
    begun = [f"the cat {'sat ' * (number % 3)}on {'a ma' * (number % 2)}" for number in numbers]
    good = [" ".join(WORDS[number % 4 :]) for number in numbers]
    bad = [f"t and {WORDS[(number + 1) % 4]}" for number in numbers]
    return {
        "chat": conversations(8),
        "texts": [
            {"prompt": prompt, "completion": answer}
            for prompt, answer in zip(begun, bad, strict=True)
        ],
        "pairs": [
            {"prompt": _user(prompt), "chosen": _assistant(one), "rejected": _assistant(other)}
            for prompt, one, other in zip(asked, good, bad, strict=True)
        ],
        "text_pairs": [
            {"prompt": prompt, "chosen": one, "rejected": other}
            for prompt, one, other in zip(begun, good, bad, strict=True)
        ],
        "answers": [
            {"prompt": _user(prompt), "completion": _assistant(one), "label": number % 3 > 0}
            for number, prompt, one in zip(numbers, map(_numbered, numbers), good, strict=True)
        ],
    }


def _numbered(number: int) -> str:
    return f"what is {'two ' * (number % 4)}plus {number}?"


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
