"""Records as other tools write them: ShareGPT, weights, tools as text, content parts, pairs without a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.chat_files import MARKED, PLAIN, tokenizer_folder, write_jsonl
from tests.data.test_conversations import masked_documents, opened
from weft.errors import DataError

ASK = {"role": "user", "content": "what is two?"}
ANSWER = {"role": "assistant", "content": "two plus three"}
ASK_AGAIN = {"role": "user", "content": "hello?"}
BAD_ANSWER = {"role": "assistant", "content": "a mat", "weight": 0}
TOOLS = [{"type": "function", "function": {"name": "seven", "parameters": {}}}]
WITH_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}\n{% endif %}" + MARKED
WITH_PARTS = MARKED.replace(
    "{{ message['content'] }}{{ eos_token }}{% endgen",
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endgen",
)


@pytest.fixture
def tok(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path / "tok")


def documents(folder: Path, *records: dict[str, Any], **options: Any) -> Any:
    return masked_documents(opened(folder, list(records), **options))


def test_turns_of_sharegpt_are_messages(tmp_path: Path, tok: Path) -> None:
    turns = [
        {"from": "system", "value": "answer"},
        {"from": "human", "value": ASK["content"]},
        {"from": "gpt", "value": ANSWER["content"]},
    ]
    messages = [{"role": "system", "content": "answer"}, ASK, ANSWER]
    wanted = documents(tmp_path, {"messages": messages})
    assert documents(tmp_path, {"conversations": turns}) == wanted
    assert documents(tmp_path, {"conversations": messages}) == wanted


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_an_answer_of_weight_0_is_read_and_is_no_target(tmp_path: Path, template: str) -> None:
    tokenizer_folder(tmp_path / "tok", template=template)
    bad = BAD_ANSWER["content"]
    messages = [ASK, BAD_ANSWER, ASK_AGAIN, {**ANSWER, "weight": 1}]
    unweighted = [ASK, {"role": "assistant", "content": bad}, ASK_AGAIN, ANSWER]
    ((tokens, mask),) = documents(tmp_path, {"messages": messages})
    ((same_tokens, all_answers),) = documents(tmp_path, {"messages": unweighted})
    ((_, first),) = documents(tmp_path, {"messages": unweighted[:2]})
    ((_, asked),) = documents(tmp_path, {"messages": [*messages[:2], {**ANSWER}]})
    assert tokens == same_tokens
    num_bad = sum(first)
    assert sum(mask) == sum(all_answers) - num_bad > 0
    start = all_answers.index(1)
    assert not any(mask[: start + num_bad])
    assert mask[start + num_bad :] == all_answers[start + num_bad :]
    assert 0 < sum(asked) < len(asked)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({**ANSWER, "weight": 0.5}, "has the weight 0.5, and only answers have one, 0 or 1"),
        ({**ASK, "weight": 1}, "has the weight 1, and only answers have one"),
        (BAD_ANSWER, "every answer has the weight 0"),
    ],
)
def test_other_weights_are_rejected(tmp_path: Path, tok: Path, message: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        documents(tmp_path, {"messages": [ASK, message]})


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_a_template_that_drops_a_weighted_answer_is_rejected(tmp_path: Path, template: str) -> None:
    """The answer of weight 0 is rendered only where it is the last message."""
    dropping = template.replace(
        "{{ message['content'] }}{{ eos_token }}",
        "{{ message['content'] if loop.last else '...' }}{{ eos_token }}",
    )
    tokenizer_folder(tmp_path / "tok", template=dropping)
    with pytest.raises(DataError, match="differently with and without"):
        documents(tmp_path, {"messages": [ASK, BAD_ANSWER, ASK_AGAIN, ANSWER]})


def test_tools_as_json_text_are_tools(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tok", template=WITH_TOOLS)
    messages = [ASK, ANSWER]
    wanted = documents(tmp_path, {"messages": messages, "tools": TOOLS}, seq_len=256)
    as_text = {"messages": messages, "tools": json.dumps(TOOLS)}
    assert documents(tmp_path, as_text, seq_len=256) == wanted
    without = documents(tmp_path, {"messages": messages, "tools": ""}, seq_len=256)
    assert len(without[0][0]) < len(wanted[0][0])
    with pytest.raises(DataError, match="'tools' is text, and no JSON"):
        documents(tmp_path, {"messages": messages, "tools": "[seven"})
    with pytest.raises(DataError, match="'tools' is no list"):
        documents(tmp_path, {"messages": messages, "tools": {"name": "seven"}})


def test_a_record_gives_variables_to_its_template(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tok", template=MARKED + "{% if loud %}said{% endif %}")
    record = {"messages": [ASK, ANSWER]}
    ((quiet, _),) = documents(tmp_path, record)
    ((loud, _),) = documents(tmp_path, {**record, "chat_template_kwargs": {"loud": True}})
    assert loud[: len(quiet)] == quiet
    assert len(loud) > len(quiet)
    with pytest.raises(DataError, match="names 'tools', which the record itself gives"):
        documents(tmp_path, {**record, "chat_template_kwargs": {"tools": []}})


def test_parts_of_text_are_text(tmp_path: Path, tok: Path) -> None:
    wanted = documents(tmp_path, {"messages": [ASK, ANSWER]})
    part = {"type": "text", "text": ANSWER["content"]}
    assert documents(tmp_path, {"messages": [ASK, {**ANSWER, "content": [part]}]}) == wanted
    image = {"type": "image_url", "image_url": {"url": "file.png"}}
    with pytest.raises(DataError, match=r"message 2 .* is no text \(got image_url"):
        documents(tmp_path, {"messages": [ASK, {**ANSWER, "content": [image, part]}]})
    with pytest.raises(DataError, match=r"has 2 content parts, and .* renders one text"):
        documents(tmp_path, {"messages": [ASK, {**ANSWER, "content": [part, part]}]})


def test_a_template_that_reads_parts_gets_them(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tok", template=WITH_PARTS)
    parts = [{"type": "text", "text": "two plus"}, {"type": "text", "text": " three"}]
    wanted = documents(tmp_path, {"messages": [ASK, ANSWER]})
    assert documents(tmp_path, {"messages": [ASK, {**ANSWER, "content": parts}]}) == wanted


@pytest.mark.parametrize("as_messages", [False, True])
def test_a_pair_without_a_prompt_begins_with_it(
    tmp_path: Path, tok: Path, as_messages: bool
) -> None:
    prompt, chosen, rejected = "what is two?", " it is two", " it is seven"
    if as_messages:
        prompt, chosen, rejected = [ASK], [ANSWER], [{**ANSWER, "content": "seven"}]
        whole = {"chosen": [*prompt, *chosen], "rejected": [*prompt, *rejected]}
    else:  # both answers begin with " it is": of the prompt, without the space behind it
        whole = {"chosen": prompt + chosen, "rejected": prompt + rejected}
        prompt, chosen, rejected = "what is two? it is", " two", " seven"
    pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    assert documents(tmp_path, whole) == documents(tmp_path, pair)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"chosen": "two", "rejected": "a mat"}, "no common beginning"),
        ({"chosen": "two plus", "rejected": "two"}, "an answer that is the beginning"),
        ({"chosen": "two", "rejected": [ASK, ANSWER]}, r"not alike \(got str and list"),
        ({"chosen": 2, "rejected": 7}, r"not alike \(got int and int"),
        ({"prompt": "two", "completion": "a", "label": False}, "label says whether .* desired"),
        ({"prompt": "two", "completion": "a", "label": True}, "label says whether .* desired"),
        ({"conversations": [{"from": "bot", "value": "two"}]}, "turn 1 of 'conversations' has no"),
        ({"conversations": ["two"]}, "turn 1 of 'conversations' has no known speaker"),
    ],
)
def test_what_cannot_be_told_is_rejected(
    tmp_path: Path, tok: Path, record: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        documents(tmp_path, record)


def test_fields_that_are_not_read_are_named_once(tmp_path: Path, tok: Path) -> None:
    messages = [ASK, {**ANSWER, "reasoning": "three"}]
    record = {"messages": messages, "id": 7, "source": "the cat", "tools": "[]"}
    samples = opened(tmp_path, [record, {**record, "score": 1}])
    said = "; not read: the fields id, messages.reasoning, score, source"
    assert samples.data.stream.read_as.endswith(said)
    assert "not read" not in opened(tmp_path, [{"messages": [ASK, ANSWER]}]).data.stream.read_as


def test_records_of_several_formats_are_mixed(tmp_path: Path, tok: Path) -> None:
    from weft.config.schema import DataConfig
    from weft.data.dataset import open_data
    from weft.models.gpt2 import config as gpt2

    chat = write_jsonl(tmp_path / "chat.jsonl", [{"messages": [ASK, ANSWER]}] * 8)
    told = write_jsonl(tmp_path / "told.jsonl", [{"instruction": "say", "output": "hello"}] * 8)
    options = {"format": "auto", "seq_len": 96, "tokenizer": str(tok)}
    data = DataConfig(mix=(f"{chat}=1", f"{told}=1"), **options)
    assert open_data(data, gpt2.Config(vocab=320)).num_samples > 1


def test_a_labelled_answer_has_the_answer_to_another_prompt_beside_it(
    tmp_path: Path, tok: Path
) -> None:
    """That of the next record with another prompt, at the end of the first one. Where the answer is
    not desired, the mask is 2, and the second document has the mark of the two.
    """
    answers = [("two", " plus"), ("two", " the cat"), ("what is", " seven")]
    labels = [True, False, "false"]
    other = [" seven", " seven", " plus"]
    records = [
        {"prompt": prompt, "completion": completion, "label": label}
        for (prompt, completion), label in zip(answers, labels, strict=True)
    ]
    samples = opened(tmp_path, records, format="unpaired", packing="single")
    assert (samples.facts()["answers"], samples.num_samples) == (3, 3)
    plain = [
        {"prompt": prompt, "completion": text}
        for (prompt, own), another in zip(answers, other, strict=True)
        for text in (own, another)
    ]
    wanted = documents(tmp_path, *plain)
    factors = [1, 1, 2, 2, 2, 2]
    assert masked_documents(samples) == [
        (tokens, [factor * one for one in mask])
        for (tokens, mask), factor in zip(wanted, factors, strict=True)
    ]
    for number, marked in enumerate([0, 1, 1]):
        row = samples.read(np.array([number]))
        assert row.documents is not None
        assert row.pairs is not None
        assert row.documents[row.pairs].tolist() == [marked]
        assert row.targets[row.pairs].min() >= 0
