"""A token that rounding routes to another expert flips the sign of a bias: no difference, also within the bound of a load."""

from __future__ import annotations

import pytest

from weft.config.load import load
from weft.models import FAMILIES
from weft.prove.proof import prove
from weft.prove.subject import Subject
from weft_selftest.mutants.fault import ModuleFault, Mutant, MutantLayout
from weft_selftest.mutants.plant import planted

WORDS = (
    "--mesh tp2 --model.name deepseek --model.layers 2 --model.dim 32 "
    "--data.seq_len 256 --batch.global_size 4 --batch.micro_size 4 --prove.before never "
    "--precision.params bfloat16 --precision.compute bfloat16"
)


def with_one_token_moved(forward, module, *args, **named):
    """The load that is nearest to the mean, on the other side of it."""
    output = forward(module, *args, **named)
    load_E = output.load.clone()
    excess_E = load_E.double() - load_E.double().mean()
    nearest = int(excess_E.abs().argmin())
    moved = int(excess_E[nearest].abs()) + 1
    sign = -1 if excess_E[nearest] > 0 else 1
    load_E[nearest] += sign * moved
    load_E[(nearest + 1) % len(load_E)] -= sign * moved
    return output._replace(load=load_E)


def test_a_flipped_bias_is_no_difference_in_16_bits(monkeypatch: pytest.MonkeyPatch):
    subject = Subject.of(load(WORDS.split(), FAMILIES), steps=1)
    fault = ModuleFault("layer1", with_one_token_moved)
    moved = Mutant("a_token_is_moved", "by rounding", MutantLayout("tp2"), (fault,))
    types = "weft.prove.proof.in_number_types"
    monkeypatch.setattr(types, lambda subject: [subject])
    with planted(moved):
        report = prove(subject)
        monkeypatch.setattr(types, lambda subject: [subject.in_float64()])
        assert not prove(subject).holds
    assert report.holds, "\n".join(report.lines())
    assert any("tokens to other experts" in note for note in report.notes)
