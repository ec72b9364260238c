"""Bad optimizer classes and groups: one line, exit code 2, under 2 s, nothing written, before any process starts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from weft.cli import main
from weft.errors import EXIT_USER
from weft.train.optimizers import start_checks, user_class  # noqa: F401 - imported once, not by the first case

LIMIT_S = 2.0
RULES = """
import weft

class Mixes(weft.Optimizer):
    def update(self, param, grad, state, *, lr, weight_decay):
        param.sub_(lr * grad / grad.norm())

class Rows(weft.Optimizer):
    kind = "reductions"

    def update_with_sums(self, param, grad, state, *, entries, lr, weight_decay):
        (size,) = yield [grad.square().sum()]
        param.sub_(lr * grad / size.sqrt())

class Takes(weft.Optimizer):
    def __init__(self, beta: float):
        self.beta = beta
"""
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "a missing file": (("--optim.name", "other.py:Rule"), "no such file"),
    "a missing module": (("--optim.name", "no.such.rules:Rule"), "no such module"),
    "no name": (("--optim.name", "rules.py:"), "names no Python object"),
    "a missing class": (("--optim.name", "rules.py:Mixed"), "did you mean 'Mixes'"),
    "a torch optimizer": (("--optim.name", "torch.optim:AdamW"), "is a torch optimizer"),
    "a violated contract": (("--optim.name", "rules.py:Mixes"), "mixes entries"),
    "an unknown option": (
        ("--optim.name", "rules.py:Takes", "--optim.options.bet", "1"),
        "did you mean 'beta'",
    ),
    "sums over the ranks of ZeRO in a deterministic run": (
        (
            *("--optim.name", "rules.py:Rows", "--mesh", "dp2", "--parallel.zero", "1"),
            *("--deterministic", "True"),
        ),
        "rules.py:Rows adds sums over the ranks of ZeRO",
    ),
    "a missing option": (("--optim.name", "rules.py:Takes"), "raises with these options"),
    "a file that raises": (("--optim.name", "raises.py:Rule"), "raises on import"),
    "a pattern that matches nothing": (("--optim.groups", "nrm*: lr_scale=2"), "no parameter"),
    "a pattern behind a wider one": (
        ("--optim.groups", "*: lr_scale=2", "*norm*: lr_scale=3"),
        "an earlier group",
    ),
    "muon of a vector": (("--optim.groups", "*norm*: optimizer=muon"), "is no matrix"),
}


@pytest.mark.parametrize("command", ["train", "prove"])
@pytest.mark.parametrize("name", CASES)
def test_a_bad_optimizer_is_one_line(
    name: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, line = CASES[name]
    (tmp_path / "rules.py").write_text(RULES)
    (tmp_path / "raises.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    start_s = time.process_time()
    code = main([command, *words])
    assert time.process_time() - start_s < LIMIT_S
    captured = capsys.readouterr()
    assert code == EXIT_USER, captured
    assert line in captured.err
    assert len(captured.err.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == ["raises.py", "rules.py"]
