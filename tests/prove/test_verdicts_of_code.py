"""Which code a verdict is reused for: the same; other code, or code that cannot be hashed, is proved again."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.input.test_model_files import FORWARD, GOOD
from weft.config.load import load
from weft.models import FAMILIES
from weft.models.user_family import UserFamily
from weft.models.user_model import model_of
from weft.start import proof_before
from weft.start.answer_here import AnswerHere
from weft.train.run_records import proof_event

ANSWER = {"verdict": "equal", "compared": 5, "steps": 3}
WORDS = "--mesh dp2 --data.seq_len 8 --batch.global_size 2 --batch.micro_size 1"


@pytest.fixture
def source_of_verdict(monkeypatch, tmp_path):
    """From the text of a notebook to the verdict of its model: proved (not really) or kept."""
    monkeypatch.setattr(proof_before, "RunningProof", lambda answer, *, is_required: answer)
    report = SimpleNamespace(to_dict=lambda: ANSWER)
    monkeypatch.setattr(proof_before, "prove_config", lambda run, *, steps: report)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}

    def verdict(text):
        module = ModuleType("notebook")
        monkeypatch.setitem(sys.modules, "notebook", module)
        exec(compile(text, "<cell>", "exec"), vars(module))
        family = UserFamily(model_of(SimpleNamespace(**vars(module)), name="mine"))
        with FAMILIES.restored():
            FAMILIES.add(family)
            run = load(["--model.name", "mine", *WORDS.split()], FAMILIES)
            found = proof_before.start_proof(run, environ, lambda prove, **_: AnswerHere(prove()))
        return found if isinstance(found, dict) else found.wait()

    return verdict


def test_a_verdict_is_of_the_code_of_a_notebook(source_of_verdict):
    assert [source_of_verdict(GOOD)["source"] for _ in range(2)] == ["proved", "cache"]
    other = GOOD.replace(FORWARD, f"{FORWARD} * 1.5")
    assert [source_of_verdict(other)["source"] for _ in range(2)] == ["proved", "cache"]
    assert source_of_verdict(GOOD)["source"] == "cache"


def test_code_that_cannot_be_hashed_is_proved_at_each_start(source_of_verdict):
    used = FORWARD.replace("x +", "(THING is None) + x +")
    text = f"THING = open(__import__('os').devnull)\n{GOOD.replace(FORWARD, used)}"
    verdicts = [source_of_verdict(text) for _ in range(2)]
    sys.modules["notebook"].THING.close()
    assert [each["source"] for each in verdicts] == ["proved", "proved"]
    assert (
        "cannot be hashed: variable THING (notebook): _io.TextIOWrapper"
        in proof_event(verdicts[0] | {"seconds": 1.0})["text"]
    )


@pytest.mark.parametrize(
    ("words", "is_proved"), [("", False), ("--compile blocks", True), ("--mesh dp2", True)]
)
def test_one_rank_is_proved_where_it_compiles_blocks(words, is_proved):
    assert proof_before.is_proved(load(words.split(), FAMILIES), {}) == is_proved
