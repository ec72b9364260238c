"""Templates and tokenizers that never end or take all memory: one line, within seconds, nothing of it in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.data import chat_template, first_use
from weft.data.chat_template import ChatTemplate, TemplateFault, find_template
from weft.data.tokenizer import BYTES, open_tokenizer
from weft.errors import DataError

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
FILTERED = "{% for a in range(99999) %}{% for b in range(99999) if a < 0 %}{% endfor %}{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LARGE = (
    "{{ 'a' * 10**10 }}",
    "{{ '%03000000000d' % 1 }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ (['a'] * 10**8) | join('b' * 100) }}",
    "{% generation %}{{ 'a' * 10**10 }}{% endgeneration %}",
)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _find(folder: Path, text: str) -> ChatTemplate:
    (folder / "template.jinja").write_text(text)
    return find_template(str(folder / "template.jinja"), open_tokenizer(BYTES))


@pytest.mark.parametrize("text", LARGE[:2])
def test_a_template_that_takes_all_memory_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="its first use takes more than 2,048 MiB"):
        _find(tmp_path, text)


@pytest.mark.slow
@pytest.mark.parametrize("text", LARGE[2:])
def test_every_way_to_take_memory_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="its first use takes more than"):
        _find(tmp_path, text)


@pytest.mark.parametrize("text", [ENDLESS, FILTERED, MACRO])
def test_a_template_that_never_ends_is_stopped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    with pytest.raises(TemplateFault, match="it takes more than"):
        ChatTemplate("x", text, {}).render([{"role": "user", "content": "Hi"}])


def test_loops_macros_and_filters_of_loops_render_as_before() -> None:
    text = (
        "{% macro f(x) %}<{{ x }}>{% endmacro %}"
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ f(m.content) }}{% else %}none{% endfor %}"
    )
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    assert ChatTemplate("x", text, {}).render(messages) == "1<u>2<a>"
    assert ChatTemplate("x", text, {}).render(messages[:1]) == "none"


def test_a_template_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _find(tmp_path, "{{ messages[0].content }}").name.endswith("template.jinja")
    monkeypatch.setattr(first_use, "_problem", lambda request: "tried again")
    _find(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(DataError, match="tried again"):
        _find(tmp_path, "{{ messages[1].content }}")


def test_a_use_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_use, "CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(first_use, "LIMIT_S", 0.2)
    with pytest.raises(DataError, match=r"takes more than 0\.2 s"):
        _find(tmp_path, "x")


def _tokenizer(folder: Path, **changes: object) -> Path:
    settings = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"},
        **changes,
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(settings))
    return path


def test_a_pattern_without_end_is_one_line(tmp_path: Path) -> None:
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "(a|aa)+c"},
        "behavior": "Isolated",
        "invert": False,
    }
    path = _tokenizer(tmp_path, pre_tokenizer=pattern)
    with pytest.raises(DataError, match="does not encode a text"):
        open_tokenizer(str(path))


def test_a_normalizer_that_takes_all_memory_is_one_line(tmp_path: Path) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6}
    path = _tokenizer(tmp_path, normalizer=replace)
    with pytest.raises(DataError, match="its first use takes more than 2,048 MiB"):
        open_tokenizer(str(path))


def test_a_pattern_that_ends_later_is_an_error_of_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "(é|éé)+c"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = open_tokenizer(str(_tokenizer(tmp_path, pre_tokenizer=pattern)))
    with pytest.raises(DataError, match="does not encode a text"):
        tokenizer.encode("é" * 80 + "x")
