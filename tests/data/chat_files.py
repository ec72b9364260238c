"""Small tokenizers with chat templates as transformers saves them, and files of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.data.tokenizer import train_bpe

WORDS = "the cat sat on a mat and said hello to you all what is two plus three five seven "
MARKED = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}\n"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A template that marks answers."""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""The same without marks."""


def tokenizer_folder(folder: Path, *, template: str | None = MARKED) -> Path:
    """A byte-level BPE of 320 tokens with special tokens and a template."""
    from tokenizers import AddedToken, Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(train_bpe([WORDS * 4], vocab=280))
    specials = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def conversations(number: int = 12) -> list[dict[str, Any]]:
    """Conversations of one to three turns and different lengths, with letters of several bytes."""
    records = []
    words = WORDS.split()
    for index in range(number):
        messages = []
        if index % 3 == 0:
            messages.append({"role": "system", "content": "answer briefly ü"})
        num_turns = 1 + index % 3
        for turn in range(num_turns):
            start = (index + turn) % 9
            asked = " ".join(words[start : start + 3])
            answer_start = (2 * index + turn) % 7
            num_words = 2 + (index + turn) % 5
            answer = " ".join(words[answer_start : answer_start + num_words])
            smiley = "😀" if index % 2 else ""
            messages.append({"role": "user", "content": f"{asked}?"})
            messages.append({"role": "assistant", "content": f"{answer} é{smiley}."})
        records.append({"messages": messages})
    return records


def write_jsonl(file: Path, records: list[dict[str, Any]]) -> Path:
    """A JSONL file with these records."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    file.write_text("".join(lines))
    return file
