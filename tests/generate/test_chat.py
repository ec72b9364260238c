"""`weft generate --chat`: the prompt is rendered by the template of the training, and an answer ends where its turn does."""

from __future__ import annotations

import pytest

from tests.data.chat_files import conversations, tokenizer_folder, write_jsonl
from tests.tiny_run import TINY
from weft.cli import main
from weft.config.command_options import read_options
from weft.errors import UserError
from weft.generate.job import make_job
from weft.generate.model_source import find_model
from weft.generate.request import Request


def trained(folder, *words):
    """A run of one step on these conversations."""
    write_jsonl(folder / "chat.jsonl", conversations(4))
    source = ["--data.source", str(folder / "chat.jsonl"), "--data.format", "chat"]
    sizes = ["--data.seq_len", "512", "--model.vocab", "320", "--batch.global_size", "1"]
    out = ["--steps", "1", "--out", str(folder / "run")]
    actual = main(["train", *TINY, *source, *sizes, *out, *words])
    assert actual == 0
    return find_model(str(folder / "run"))


def test_the_prompt_is_a_question_and_the_end_of_a_turn_stops(tmp_path):
    source = trained(tmp_path, "--data.chat_template", "chatml")
    job = make_job(Request(prompt="hi", chat=True), source)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert bytes(job.tokens[0]).decode() == expected
    assert job.prompts == (("hi",))
    assert job.request.stop == "<|im_end|>"
    asked = make_job(Request(prompt="hi", chat=True, stop="x", chat_template="alpaca"), source)
    assert bytes(asked.tokens[0]).decode() == "### Instruction:\nhi\n\n### Response:\n"
    assert asked.request.stop == "x"


def test_the_template_of_the_tokenizer_is_transformers(tmp_path):
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path / "tok")
    source = trained(tmp_path, "--data.tokenizer", str(folder))
    job = make_job(Request(prompt="hello to you", chat=True), source)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "hello to you"}], add_generation_prompt=True, return_dict=True
    )
    assert list(job.tokens[0]) == expected["input_ids"]
    assert job.request.stop == "</s>"


def test_without_a_template_one_line_says_so(tmp_path):
    (tmp_path / "t.txt").write_text("the cat sat on the mat\n" * 20)
    out = ["--steps", "1", "--out", str(tmp_path / "run")]
    actual = main(["train", *TINY, "--data.source", str(tmp_path / "t.txt"), *out])
    assert actual == 0
    source = find_model(str(tmp_path / "run"))
    with pytest.raises(UserError, match="has no chat template"):
        make_job(Request(prompt="hi", chat=True), source)


def test_the_flag_needs_no_value():
    options, places = read_options(["run", "--chat", "--prompt", "hi"], Request)
    assert (options.chat, options.prompt, places) == (True, "hi", ["run"])
    assert not read_options(["--chat", "False"], Request)[0].chat
