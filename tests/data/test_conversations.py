"""Fine-tuning records: tokens and masks equal transformers' and TRL's rule; rows keep conversations whole and apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chat_files import MARKED, PLAIN, conversations, tokenizer_folder, write_jsonl
from weft.config.schema import DataConfig
from weft.data.conversations import ConversationSamples, truncation_note
from weft.data.dataset import open_data
from weft.data.packing import pack_rows
from weft.data.prepare import PrepareOptions, prepare
from weft.data.prepared import open_prepared
from weft.data.samples import IGNORE
from weft.errors import DataError
from weft.models.gpt2 import config as gpt2

MODEL = gpt2.Config(vocab=320)


def opened(folder, records, **options) -> ConversationSamples:
    """The samples of these records."""
    file = write_jsonl(folder / "records.jsonl", records)
    options = {"format": "auto", "seq_len": 96, "tokenizer": str(folder / "tok"), **options}
    data_config = DataConfig(source=str(file), **options)
    samples = open_data(data_config, MODEL)
    assert isinstance(samples, ConversationSamples)
    return samples


def masked_documents(samples):
    """Tokens and mask of every document."""
    bounds = samples.data.stream.document_bounds
    return [
        (samples.data.stream.read(start, stop).tolist(), samples.data.mask[start:stop].tolist())
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]


@pytest.fixture
def tok(tmp_path):
    return tokenizer_folder(tmp_path / "tok")


def test_tokens_and_masks_of_marked_templates_are_those_of_transformers(tmp_path, tok):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tok)
    records = conversations()
    found = masked_documents(opened(tmp_path, records, seq_len=128))
    for record, (tokens, mask) in zip(records, found, strict=True):
        expected = reference.apply_chat_template(
            record["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert tokens == expected["input_ids"]
        assert mask == expected["assistant_masks"]
        assert 0 < sum(mask) < len(mask)


def test_without_marks_answers_are_what_completion_only_masking_finds(tmp_path):
    """TRL's rule for prompt and completion: the tokens of the prompt with the header do not count."""
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path / "tok", template=PLAIN)
    reference = AutoTokenizer.from_pretrained(folder)
    records = conversations()
    found = masked_documents(opened(tmp_path, records))
    for record, (tokens, mask) in zip(records, found, strict=True):
        messages = record["messages"]
        expected = [0] * len(tokens)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = reference.apply_chat_template(
                    messages[:index], add_generation_prompt=True, return_dict=True
                )["input_ids"]
                whole = reference.apply_chat_template(messages[: index + 1], return_dict=True)
                start = len(prompt)
                stop = len(whole["input_ids"])
                expected[start:stop] = [1] * (stop - start)
        assert tokens == reference.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert mask == expected


@pytest.mark.parametrize("as_messages", [False, True])
def test_prompt_and_completion_are_masked_as_trl_does(tmp_path, tok, as_messages):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tok)
    records = []
    for index in range(6):
        prompt = f"what is {index}?"
        answer = f" it is {index} and é"
        if as_messages:
            prompt = [{"role": "user", "content": prompt}]
            answer = [{"role": "assistant", "content": answer}]
        records.append({"prompt": prompt, "completion": answer})
    for record, (tokens, mask) in zip(
        records, masked_documents(opened(tmp_path, records)), strict=True
    ):
        if as_messages:
            prompt = reference.apply_chat_template(
                record["prompt"], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            whole = reference.apply_chat_template(
                record["prompt"] + record["completion"], return_dict=True
            )["input_ids"]
        else:
            prompt = reference(record["prompt"])["input_ids"]
            whole = reference(record["prompt"] + record["completion"] + "</s>")["input_ids"]
        assert tokens == whole
        num_answer = len(whole) - len(prompt)
        expected = [0] * len(prompt) + [1] * num_answer
        assert mask == expected


def test_instructions_are_conversations_of_two_messages(tmp_path, tok):
    record = {"instruction": "say hello", "input": "to you", "output": "hello you"}
    chat = [
        {"role": "user", "content": "say hello\n\nto you"},
        {"role": "assistant", "content": "hello you"},
    ]
    (found,) = masked_documents(opened(tmp_path, [record]))
    samples = opened(tmp_path, [{"messages": chat}])
    (expected,) = masked_documents(samples)
    assert found == expected


def test_parquet_and_gzip_hold_the_same_records(tmp_path, tok):
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    records = conversations(5)
    expected = masked_documents(opened(tmp_path, records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    text = (tmp_path / "records.jsonl").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    for name in ("a.parquet", "a.jsonl.gz"):
        options = DataConfig(
            source=str(tmp_path / name), format="chat", tokenizer=str(tok), seq_len=96
        )
        assert masked_documents(open_data(options, MODEL)) == expected


def test_rows_keep_conversations_apart_and_whole(tmp_path, tok):
    samples = opened(tmp_path, conversations(20), seq_len=128)
    arrays = samples.read(np.arange(samples.num_samples))
    documents = masked_documents(samples)
    seen = []
    for row in range(samples.num_samples):
        for place, number in enumerate(samples.documents(row)):
            tokens, mask = documents[number]
            (where,) = np.nonzero(arrays.documents[row] == place)
            assert arrays.inputs[row, where].tolist() == tokens
            values = arrays.positions[row, where].tolist()
            assert values == list(range(len(tokens)))
            expected = [
                token if counts else IGNORE
                for token, counts in zip(tokens[1:], mask[1:], strict=True)
            ]
            values = arrays.targets[row, where].tolist()
            assert values == [*expected, IGNORE]
            seen.append(number)
        padding = arrays.documents[row] > place
        assert (arrays.targets[row, padding] == IGNORE).all()
    assert sorted(seen) == list(range(20))
    assert samples.num_samples < 13
    single = opened(tmp_path, conversations(20), seq_len=128, packing="single")
    assert single.num_samples == 20


@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_rows_hold_every_item_once_within_their_capacity(lengths):
    capacity = 16
    rows = pack_rows(np.array(lengths), capacity)
    items = []
    for row in range(len(rows)):
        in_row = rows[row].tolist()
        used = sum(lengths[item] for item in in_row)
        assert used <= capacity
        items += in_row
    assert sorted(items) == list(range(len(lengths)))
    fewest_rows = -(-sum(lengths) // capacity)
    assert len(rows) <= 2 * fewest_rows


def test_the_drawing_of_rows_is_what_is_packed():
    rows = pack_rows(np.array([6, 4, 3, 2, 1]), 8)
    actual = [rows[row].tolist() for row in range(2)]
    assert actual == [[0, 3], [1, 2, 4]]


def test_truncation_is_counted_and_reported(tmp_path, tok):
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answer = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 40}]
    question = [{"role": "user", "content": "a " * 40}, {"role": "assistant", "content": "b"}]
    records = [{"messages": messages} for messages in (short, answer, question)]
    samples = opened(tmp_path, records, seq_len=32)
    lengths = [len(tokens) for tokens, _ in masked_documents(samples)]
    facts = samples.facts()
    assert facts["cut"] == 2
    expected = sum(max(length - 32, 0) for length in lengths)
    assert facts["cut_tokens"] == expected
    assert facts["without_target"] == 1
    note = truncation_note(facts, seq_len=32)
    lost = facts["cut_tokens"]
    assert note == (
        f"of 3 conversations: 2 texts cut at data.seq_len 32, {lost} tokens lost; "
        "1 without a target left are left out"
    )
    assert truncation_note(opened(tmp_path, records, seq_len=256).facts(), seq_len=256) is None
    with pytest.raises(DataError, match=r"2 texts of .* longer than the sequence"):
        opened(tmp_path, records, seq_len=32, long="error")


def test_truncation_of_texts_with_classes_is_reported(tmp_path, tok):
    records = [{"text": "a " * 40, "label": "good"}, {"text": "b", "label": "bad"}]
    options = {"format": "classify", "classes": ("good", "bad"), "seq_len": 32}
    note = truncation_note(opened(tmp_path, records, **options).facts(), seq_len=32)
    assert note is not None
    assert note.startswith("of 2 texts: 1 text cut at data.seq_len 32")


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_prepared_records_are_those_that_are_encoded_at_the_start(tmp_path, tok, kind):
    records = conversations()
    if kind == "preference":
        records = [
            {"prompt": f"say {index}", "chosen": f" yes {index}" * index, "rejected": " no"}
            for index in range(1, 9)
        ]
    direct = opened(tmp_path, records)
    options = PrepareOptions(
        (str(tmp_path / "records.jsonl"),), tokenizer=str(tok), valid=0, format="auto"
    )
    meta = prepare(options, tmp_path / "prepared")
    assert meta.format == 2
    assert meta.record_format == kind
    assert meta.num_changed == 0
    assert list(open_prepared(tmp_path / "prepared").damage()) == []
    source = DataConfig(source=str(tmp_path / "prepared"), seq_len=96)
    stored = open_data(source, MODEL)
    assert stored.num_samples == direct.num_samples
    everything = np.arange(stored.num_samples)
    for name, array in vars(direct.read(everything)).items():
        assert np.array_equal(getattr(stored.read(everything), name), array), name


def test_pairs_share_a_row_and_are_marked_once(tmp_path, tok):
    records = [
        {"prompt": f"say {index}", "chosen": f" yes {index}" * index, "rejected": " no"}
        for index in range(1, 9)
    ]
    samples = opened(tmp_path, records, seq_len=64)
    arrays = samples.read(np.arange(samples.num_samples))
    assert samples.facts()["pairs"] == 8 == arrays.pairs.sum()
    assert (arrays.targets[arrays.pairs] != IGNORE).all()
    assert (arrays.documents[arrays.pairs] % 2 == 0).all()
    assert max(samples.table.lengths) <= 62


def test_a_tokenizer_that_changes_the_text_is_reported(tmp_path):
    from tokenizers import Tokenizer, normalizers

    folder = tokenizer_folder(tmp_path / "tok")
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(file))
    (tmp_path / "a.txt").write_text("the cat\n\nThe Mat\n\nA b\n")
    options = PrepareOptions((str(tmp_path / "a.txt"),), tokenizer=str(file), split_on="blank")
    meta = prepare(options, tmp_path / "out")
    assert meta.num_changed == 2
    assert meta.first_changed == "document 2: 'The Mat\\n' becomes 'the mat\\n' at character 0"


def test_dates_are_rejected_where_tokens_are_made_at_every_start(tmp_path, tok):
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%Y') }}" + MARKED)
    with pytest.raises(DataError, match="tomorrow's tokens would be others"):
        opened(tmp_path, conversations(2), chat_template=str(tmp_path / "dated.jinja"))


@pytest.mark.parametrize("name", ["chatml", "alpaca"])
def test_built_in_templates_mark_answers_for_bytes(tmp_path, name):
    records = [{"instruction": "hi", "output": "yo"}]
    samples = opened(tmp_path, records, tokenizer="bytes", chat_template=name)
    ((tokens, mask),) = masked_documents(samples)
    answer_tokens = [token for token, counts in zip(tokens, mask, strict=True) if counts]
    answer = bytes(answer_tokens)
    assert answer in (b"yo<|im_end|>", b"yo\n\n")
