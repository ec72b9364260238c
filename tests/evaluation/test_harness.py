"""The adapter to lm-evaluation-harness: its three requests equal plain forwards; without the library one line says so."""

from __future__ import annotations

import abc
import json
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
    text = folder / "t.txt"
    out = folder / "run"
    text.write_text(TEXT)
    source = ["--data.source", str(text), "--steps", "40", "--out", str(out)]
    rate = ["--optim.lr", "0.03", "--optim.warmup", "0"]
    assert main(["train", *TINY, *source, *rate]) == 0
    return out


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
        logits = model._logits(tuple(tokens[:stop]))
        last = logits[-1].log_softmax(-1)
        following = tokens[stop]
        scores.append(float(last[following]))
    return scores


def score(model, context, continuation):
    """Log-likelihood of a continuation, and whether it is the likeliest."""
    request = Request((context, continuation))
    (scored,) = model.loglikelihood([request])
    return scored


def generated(model, context, **options):
    requests = [Request((context, options))]
    (text,) = model.generate_until(requests)
    return text


def test_a_continuation_is_scored_after_its_context(model):
    logprob, is_greedy = score(model, "the cat", " sat")
    assert isinstance(is_greedy, bool)
    *_, space, s, a, t = logprobs(model, list(b"the cat sat"))
    assert logprob == pytest.approx(space + s + a + t, rel=1e-5)
    likeliest = generated(model, "the cat", until=[], max_gen_toks=2)
    _, is_greedy = score(model, "the cat", likeliest)
    assert is_greedy
    trailing, _ = score(model, "the cat ", "sat")
    assert trailing == pytest.approx(logprob, rel=1e-6)
    alone, _ = score(model, "", "sat")
    expected = logprobs(model, [0, *b"sat"])
    assert alone == pytest.approx(sum(expected), rel=1e-5)


def test_rolling_scores_every_token_once(model):
    tokens = list(range(40))
    windows = rolling_windows(tokens, prefix=99, length=16)
    scored = []
    for window in windows:
        assert len(window.tokens) <= 17
        scored += window.tokens[-window.num_scored :]
    assert scored == tokens
    assert windows[0].tokens[0] == 99
    texts = ("the cat", "", TEXT[:60])
    requests = [Request((text,)) for text in texts]
    short, empty, long = model.loglikelihood_rolling(requests)
    expected = logprobs(model, [0, *b"the cat"])
    assert short == pytest.approx(sum(expected), rel=1e-5)
    assert empty == 0.0
    assert math.isfinite(long)
    assert long < short


def test_generation_is_greedy_and_ends_at_a_stop_text(model):
    text = generated(model, "the ", until=[], max_gen_toks=6)
    tokens = list(b"the ")
    for _ in range(6):
        logits = model._logits(tuple(tokens))
        likeliest = torch.argmax(logits[-1])
        tokens.append(int(likeliest))
    assert text == model.tokenizer.decode(tokens[4:])
    stop = text[2]
    cut = generated(model, "the ", until=[stop], max_gen_toks=6)
    assert cut == text[: text.index(stop)]
    with pytest.raises(UserError, match="likeliest tokens alone"):
        generated(model, "the ", do_sample=True)


def test_without_the_library_one_line_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm_eval is not installed.*eval-harness"):
        HarnessModel(run)


ROLLING_TASK = """task: rolling
dataset_path: json
dataset_kwargs:
  data_files: {test: DATA}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
"""


@pytest.mark.slow
def test_the_library_itself_counts_the_bits_of_a_text(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "the cat sat"}) + "\n", encoding="utf-8")
    task = ROLLING_TASK.replace("DATA", str(data))
    (tmp_path / "rolling.yaml").write_text(task, encoding="utf-8")
    model = HarnessModel(run)
    results = lm_eval.simple_evaluate(
        model,
        tasks=["rolling"],
        task_manager=TaskManager(include_path=str(tmp_path)),
        bootstrap_iters=0,
    )
    tokens = [model.prefix_token, *model.tokenizer.encode("the cat sat")]
    total_bits = -sum(logprobs(model, tokens)) / math.log(2)
    bits = total_bits / len("the cat sat")
    assert results["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
