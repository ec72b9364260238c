"""Models that deceive a short trial are stopped by name before a run; the same model without the deceit is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.user_models.deceiving import LARGE, MODELS, SOUND
from weft.config.load import load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import plan_of
from weft.errors import UserError
from weft.models import FAMILIES
from weft.start.rules.compiled_code import compiled_code_faults
from weft.train.model_checks import check_user_model

SIZES = ("--data.seq_len", "128", "--mesh", "dp1")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    with FAMILIES.restored():
        yield tmp_path / "my_model.py"


def check(file: Path, text: str, *words: str) -> None:
    """Check a model as a command does."""
    file.write_text(text)
    run = load([str(file), *SIZES, *words], FAMILIES)
    faults = run_checks(run, config_checks)
    if faults:
        raise UserError(*faults)
    check_user_model(FAMILIES[run.model.name], run.model, plan_of(run))


@pytest.mark.parametrize("words", [(), ("--mesh", "cp2"), LARGE], ids=["", "cp2", "large"])
def test_the_sound_model_is_accepted(file: Path, words: tuple[str, ...]) -> None:
    check(file, SOUND, *words)


SCALED = "x * (3 if torch.compiler.is_compiling() else 1)"
COMPILED = ("--compile", "blocks")


@pytest.mark.parametrize(
    ("before", "words", "is_rejected"),
    [("never", COMPILED, True), ("always", COMPILED, False), ("never", (), False)],
)
def test_code_that_asks_whether_it_is_compiled_is_compiled_only_where_it_is_proved(
    file: Path, before: str, words: tuple[str, ...], is_rejected: bool
) -> None:
    file.write_text(
        SOUND.replace(
            "        x = self.tok(ids)\n", f"        x = self.tok(ids)\n        x = {SCALED}\n"
        )
    )
    run = load([str(file), *SIZES, *words, "--prove.before", before], FAMILIES)
    faults = [str(fault) for fault in compiled_code_faults(run, {})]
    line = (
        "compile: Tokens.forward (my_model.py) asks whether it is compiled, so it may compute other"
        " numbers, and nothing is proved (got blocks; need off). Fix: --compile off, or --prove.before"
        " always"
    )
    assert faults == [line] * is_rejected


@pytest.mark.parametrize("name", MODELS)
def test_a_deceiving_model_is_stopped_by_name(name: str, file: Path) -> None:
    model = MODELS[name]
    with pytest.raises(UserError) as caught:
        check(file, model.text, *model.words)
    (fault,) = caught.value.faults
    assert model.line in str(fault)
