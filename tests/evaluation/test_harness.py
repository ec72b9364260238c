"""The adapter to lm-evaluation-harness: its three requests equal plain forwards; without the library one line says so."""

from __future__ import annotations

import abc
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.tiny_run import TINY
from weft.cli import main
from weft.errors import UserError
from weft.evaluation.harness import HarnessModel, rolling_windows

TEXT = "the cat sat on the mat and the dog sat on the log\n" * 9


@dataclass
class Request:
    """As lm_eval.api.instance.Instance: `args` of one request."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    (folder / "t.txt").write_text(TEXT)
    source = ["--data.source", str(folder / "t.txt"), "--steps", "40", "--out", str(folder / "run")]
    rate = ["--optim.lr", "0.03", "--optim.warmup", "0"]
    assert main(["train", *TINY, *source, *rate]) == 0
    return folder / "run"


@pytest.fixture
def model(run, monkeypatch):
    class LM(abc.ABC):  # noqa: B024 - as the library declares it
        """The base class of the library's models."""

    package, api, module = (types.ModuleType(name) for name in ("lm_eval", "api", "model"))
    module.LM = LM
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.api", api)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    found = HarnessModel(run, max_length=16)
    assert isinstance(found, LM)
    return found


def logprobs(model, tokens):
    """log p of each token after the first, one forward a prefix."""
    scores = []
    for stop in range(1, len(tokens)):
        last = model._logits(tuple(tokens[:stop]))[-1].log_softmax(-1)
        scores.append(float(last[tokens[stop]]))
    return scores


def test_a_continuation_is_scored_after_its_context(model):
    ((score, greedy),) = model.loglikelihood([Request(("the cat", " sat"))])
    expected = logprobs(model, list(b"the cat sat"))[-4:]
    assert score == pytest.approx(sum(expected), rel=1e-5)
    likeliest = model.generate_until([Request(("the cat", {"until": [], "max_gen_toks": 2}))])[0]
    ((_, is_greedy),) = model.loglikelihood([Request(("the cat", likeliest))])
    assert is_greedy
    assert isinstance(greedy, bool)
    ((trailing, _),) = model.loglikelihood([Request(("the cat ", "sat"))])
    assert trailing == pytest.approx(score, rel=1e-6)
    ((alone, _),) = model.loglikelihood([Request(("", "sat"))])
    assert alone == pytest.approx(sum(logprobs(model, [0, *b"sat"])), rel=1e-5)


def test_rolling_scores_every_token_once(model):
    tokens = list(range(40))
    windows = rolling_windows(tokens, prefix=99, length=16)
    scored = [token for window in windows for token in window.tokens[-window.num_scored :]]
    assert scored == tokens
    assert windows[0].tokens[0] == 99
    assert all(len(window.tokens) <= 17 for window in windows)
    (short,) = model.loglikelihood_rolling([Request(("the cat",))])
    assert short == pytest.approx(sum(logprobs(model, [0, *b"the cat"])), rel=1e-5)
    (empty,) = model.loglikelihood_rolling([Request(("",))])
    assert empty == 0.0
    (long,) = model.loglikelihood_rolling([Request((TEXT[:60],))])
    assert math.isfinite(long)
    assert long < short


def test_generation_is_greedy_and_ends_at_a_stop_text(model):
    (text,) = model.generate_until([Request(("the ", {"until": [], "max_gen_toks": 6}))])
    tokens = list(b"the ")
    for _ in range(6):
        tokens.append(int(torch.argmax(model._logits(tuple(tokens))[-1])))
    assert text == model.tokenizer.decode(tokens[4:])
    stop = text[2]
    (cut,) = model.generate_until([Request(("the ", {"until": [stop], "max_gen_toks": 6}))])
    assert cut == text[: text.index(stop)]
    with pytest.raises(UserError, match="likeliest tokens alone"):
        model.generate_until([Request(("the ", {"do_sample": True}))])


def test_without_the_library_one_line_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm_eval is not installed.*eval-harness"):
        HarnessModel(run)
