"""torch's compiler is not imported for shapes and dispatch modes; once it is imported, torch's own wrappers are used."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_run import TINY
from weft.models.common.uncompiled import COMPILER, uncompiled_mode

SCRIPT = """
import sys
import torch
from weft.cli import main
from weft.config.schema import OptimConfig
from weft.models import FAMILIES
from weft.train.init_from import meta_modules
from weft.train.optim import make_optimizer

words = ("--mesh", "tp2", *sys.argv[1:])
assert main(["train", *words, "--steps", "1", "--out", "run"]) == 0
others = ("weft_plan", "weft_selftest", "weft.planner")
found = [name for name in sys.modules if name.startswith(others)]
assert not found, f"a run has imported {found}"
assert main(["explain", *words]) == 0
for family in FAMILIES.values():
    meta_modules(lambda: family.blocks(family.Config()))
param = torch.nn.Parameter(torch.ones(2, 2))
param.grad = torch.ones(2, 2)
make_optimizer({"w": param}, OptimConfig(name="sgd")).step()
assert "torch._dynamo" not in sys.modules, "torch._dynamo was imported"
"""


def test_runs_plans_skeletons_and_optimizers_import_no_compiler_and_runs_no_planner(tmp_path):
    """Nor the self-tests; one new interpreter for all, as each imports torch again."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *TINY],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def counting_mode():
    """A mode that counts operations; a new class, since each is treated once."""

    @uncompiled_mode
    class Count(TorchDispatchMode):
        num_calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num_calls += 1
            return func(*args, **(kwargs or {}))

    return Count()


def test_once_the_compiler_is_imported_functions_are_excluded_by_it(monkeypatch):
    excluded = []

    def disable(function, recursive, *, wrapping):
        excluded.append(function.__name__)
        return function

    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    with counting_mode() as count:
        torch.ones(2)
        assert COMPILER not in sys.modules
        monkeypatch.setitem(sys.modules, COMPILER, SimpleNamespace(disable=disable))
        torch.ones(2)
        torch.ones(2)
    assert count.num_calls == 3
    assert excluded == ["__torch_dispatch__"]


def test_a_torch_with_other_internals_keeps_its_wrappers(monkeypatch):
    monkeypatch.delattr(torch._compile, "_disable_dynamo")

    with counting_mode() as count:
        torch.ones(2)
    assert count.num_calls == 1
