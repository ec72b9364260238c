"""Sections of the run config: descriptions of all keys, and validation of their combinations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from weft.config.keys import keys_of
from weft.config.load import load
from weft.config.rules import layout
from weft.config.rules.checks import Check, run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run
from weft.core.mesh import Mesh
from weft.errors import Fault
from weft.models import FAMILIES


def read(*words):
    return load(words, FAMILIES)


def validation_faults(*words):
    return [str(fault) for fault in run_checks(read(*words), config_checks)]


def test_every_key_has_a_description_of_one_line():
    for key, field in keys_of(type(read())).items():
        assert field.description, key
        assert "\n" not in field.description


def test_a_run_never_changes():
    with pytest.raises(ValidationError, match="frozen"):
        read().steps = 3


@pytest.mark.parametrize(
    "preset", [name for family in FAMILIES.values() for name in family.PRESETS]
)
def test_every_preset_fits_by_default(preset):
    assert validation_faults("--model.preset", preset) == []


def test_the_default_fits_eight_ranks():
    assert validation_faults("--mesh", "pp2 dp2 tp2", "--parallel.sequence", "True") == []


def test_a_run_counts_its_micro_batches_and_stages():
    run = read(
        "--mesh",
        "pp2 dp2 tp2",
        "--batch.global_size",
        "24",
        "--batch.micro_size",
        "3",
        "--pipeline.chunks",
        "2",
    )
    assert run.num_data_ranks == 2
    assert run.num_micro == 4
    assert run.num_stages == 4


@given(
    degree=st.integers(1, 12),
    kv_heads=st.integers(1, 12),
    groups=st.integers(1, 3),
    ffn=st.integers(1, 60),
)
def test_tp_is_rejected_exactly_where_it_does_not_divide(degree, kv_heads, groups, ffn):
    heads = kv_heads * groups
    words = [
        "--model.dim",
        f"{4 * heads}",
        "--model.heads",
        f"{heads}",
        "--model.kv_heads",
        f"{kv_heads}",
    ]
    words += ["--model.ffn", f"{ffn}", "--mesh", f"tp{degree}"]
    run = read(*words)
    faults = list(layout.axes_divide(run.device_mesh, run.model))
    is_divisible = all(size % degree == 0 for size in (heads, ffn))
    assert bool(faults) != is_divisible


def test_a_vocabulary_that_tp_does_not_divide_is_padded_and_no_fault():
    assert validation_faults("--mesh", "tp2", "--model.vocab", "257") == []


@given(ranks=st.integers(1, 9), micro=st.integers(1, 9), size=st.integers(1, 99))
def test_a_batch_is_rejected_exactly_where_it_does_not_divide(ranks, micro, size):
    words = [
        "--mesh",
        f"dp{ranks}",
        "--batch.micro_size",
        f"{micro}",
        "--batch.global_size",
        f"{size}",
    ]
    run = read(*words)
    faults = list(layout.batch_divides(run.device_mesh, run.batch))
    assert bool(faults) == bool(size % (ranks * micro))


@given(length=st.integers(1, 99), degree=st.integers(1, 8))
def test_a_sequence_is_rejected_exactly_where_its_parts_are_unequal(length, degree):
    words = ["--parallel.sequence", "True", "--mesh", f"tp{degree}", "--data.seq_len", f"{length}"]
    run = read(*words)
    faults = list(layout.sequence_divides(run.device_mesh, run.model, run.parallel, seq_len=length))
    assert bool(faults) == bool(length % degree)


@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=6),
)
def test_a_split_is_accepted_exactly_where_it_counts_all_stages_and_layers(ranks, chunks, counts):
    layers = 12
    words = [
        "--model.layers",
        f"{layers}",
        "--mesh",
        f"pp{ranks}",
        "--pipeline.chunks",
        f"{chunks}",
    ]
    run = read(*words, "--pipeline.split", *map(str, counts))
    faults = list(
        layout.layers_make_stages(
            run.device_mesh, run.model, run.pipeline, seq_len=run.data.seq_len
        )
    )
    fits = len(counts) == ranks * chunks and sum(counts) == layers
    assert bool(faults) != fits


@given(numbers=st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_divisors_are_all_common_ones(numbers):
    expected = {n for n in range(1, 61) if all(number % n == 0 for number in numbers)}
    assert set(layout.divisors(*numbers)) == expected


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--mesh", "pp8"],
            "more stages than layers (got 8 stages, 4 layers; need at most 6 stages: the layers, embed and head)",
        ),
        (["--mesh", "pp2", "--pipeline.schedule", "interlaved"], "did you mean 'interleaved'?"),
        (
            ["--mesh", "pp2", "--pipeline.schedule", "gpipe", "--pipeline.chunks", "2"],
            "pipeline.chunks: gpipe does not",
        ),
        (
            [
                "--mesh",
                "pp4 dp2",
                "--pipeline.schedule",
                "interleaved",
                "--model.layers",
                "8",
                "--batch.global_size",
                "12",
            ],
            "--batch.global_size 16",
        ),
        (
            ["--model.name", "gpt2", "--data.seq_len", "257"],
            "data.seq_len: longer than the positions",
        ),
        (
            ["--model.vocab", "255"],
            "model.vocab: is smaller than the tokenizer's (got 255; need at least 256 for bytes)",
        ),
        (
            ["--mesh", "cp3"],
            "data.seq_len: does not divide by cp3 (got 128; need a multiple of 6: two chunks",
        ),
        (["--mesh", "cp3"], "Fix: --data.seq_len 126 or --data.seq_len 132"),
        (["--mesh", "pp100", "--model.layers", "40"], 'Fix: --mesh "pp25 dp4" or --mesh pp25'),
        (
            ["--mesh", "cp2 tp2", "--parallel.sequence", "True", "--data.seq_len", "126"],
            "data.seq_len: does not divide by cp2 x tp2 (got 126; need a multiple of 4: two chunks for each of cp2, tp2",
        ),
        (
            ["--mesh", "cp8", "--parallel.context", "ulysses"],
            "parallel.context: ulysses needs heads % cp == 0, and cp8 does not divide the heads (got 4 heads; need",
        ),
        (
            ["--mesh", "cp4 tp2", "--parallel.context", "ulysses"],
            "2 heads on each rank; need a multiple of cp). Fix: --parallel.context ring or --parallel.context allgather",
        ),
        (
            ["--mesh", "cp2", "--model.name", "mnist", "--data.source", "digits"],
            "Fix: --mesh dp2 or --mesh dp1",
        ),
    ],
)
def test_parts_that_do_not_fit_are_reported_in_one_line(words, line):
    (reported,) = validation_faults(*words)
    assert line in reported
    assert "\n" not in reported


def test_faults_of_independent_parts_are_reported_together():
    reported = validation_faults(
        "--mesh",
        "tp3",
        "--batch.global_size",
        "7",
        "--pipeline.schedule",
        "f1b1",
        "--model.vocab",
        "3",
    )
    assert {line.partition(":")[0] for line in reported} == {
        "mesh",
        "batch.global_size",
        "pipeline.schedule",
        "model.vocab",
    }


@given(
    st.sampled_from(["optim", "optim.lr", "mesh", "mesh.x"]),
    st.sampled_from(["optim", "optim.lr", "mesh", "mes"]),
)
def test_a_check_is_skipped_where_a_key_that_it_reads_is_at_fault(reads, key):
    known = Fault(key, "bad")
    found = Fault("x", "found")
    check = Check((reads,), lambda: [found])
    reported = run_checks(read(), lambda run: [check], known=[known])
    is_part = f"{key}.".startswith(f"{reads}.")
    is_whole = f"{reads}.".startswith(f"{key}.")
    is_blind = is_part or is_whole
    assert reported == ((known,) if is_blind else (known, found))


def test_run_is_the_base_of_every_familys_run():
    assert isinstance(read("--model.name", "mnist"), Run)


@pytest.mark.parametrize(("vocab", "num_faults"), [(2, 1), (3, 0)])
def test_each_rank_of_tp_has_an_entry_of_the_vocabulary(vocab: int, num_faults: int) -> None:
    words = (
        f"--model.heads 6 --model.kv_heads 3 --model.ffn 33 --model.dim 24 --model.vocab {vocab}"
    )
    model = load(words.split(), FAMILIES).model
    faults = list(layout.axis_divides(Mesh.parse("tp3"), model, "tp"))
    assert len(faults) == num_faults
    assert all("tp3 has more ranks than the model's vocab" in fault.what for fault in faults)
