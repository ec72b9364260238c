"""Named arrays: the same rows from every kind of source; what is missing, misshapen or out of range is one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from weft.core.input_spec import InputSpec, spec_problem
from weft.data import arrays as arrays_module
from weft.data.arrays import RANDOM, ArraySamples, open_arrays
from weft.data.mixture import make_mixture_sampler
from weft.data.samples import MixtureSamples, num_evaluated
from weft.errors import DataError
from weft.prove.raw_batch import batch_of
from weft.train.data_loader import whole_batch

SPECS = {
    "image": InputSpec((2, 3)),
    "label": InputSpec((), "int64", below=5),
    "targets": InputSpec((4,), "int64", below=7),
}
N = 6
Values = dict[str, NDArray[Any]]


def values() -> Values:
    generator = np.random.default_rng(1)
    targets = generator.integers(0, 7, (N, 4), dtype=np.int16)
    targets[0, 1] = -100
    return {
        "image": generator.standard_normal((N, 2, 3), dtype=np.float32),
        "label": generator.integers(0, 5, N, dtype=np.uint8),
        "targets": targets,
    }


def in_folder(found: Mapping[str, NDArray[Any]], folder: Path) -> str:
    for name, array in found.items():
        np.save(folder / f"{name}.npy", array)
    return str(folder)


def in_npz(found: Mapping[str, NDArray[Any]], folder: Path) -> str:
    np.savez_compressed(folder / "a.npz", **found)
    return str(folder / "a.npz")


def in_safetensors(found: Mapping[str, NDArray[Any]], folder: Path) -> str:
    save_file(dict(found), folder / "a.safetensors")
    return str(folder / "a.safetensors")


@pytest.mark.parametrize("store", [in_folder, in_npz, in_safetensors])
def test_every_kind_of_source_gives_the_same_rows(
    store: Callable[[Values, Path], str], tmp_path: Path
) -> None:
    stored = values()
    samples = open_arrays(store(stored, tmp_path), SPECS)
    assert samples.num_samples == N
    read = samples.read(np.array([4, 0]))
    assert np.array_equal(read.inputs, stored["image"][[4, 0]])
    assert read.targets.dtype == np.int64
    assert np.array_equal(read.targets, stored["targets"][[4, 0]])
    assert read.fields is not None
    assert list(read.fields) == ["label"]
    assert read.fields["label"].dtype == np.int64
    assert np.array_equal(read.fields["label"], stored["label"][[4, 0]])


def test_both_sides_of_a_proof_make_the_same_batch(tmp_path: Path) -> None:
    samples = open_arrays(in_npz(values(), tmp_path), SPECS)
    chosen = np.array([3, 1, 5])
    one, other = whole_batch(samples, chosen, later=False), batch_of(samples, chosen, later=False)
    assert one.tensors().keys() == other.tensors().keys() >= {"inputs", "targets", "label"}
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
    half = one.rows(slice(0, 2))
    assert half.fields is not None
    assert torch.equal(half.fields["label"], torch.from_numpy(values()["label"][[3, 1]]).long())


def test_a_filler_has_no_targets_and_without_targets_whole_batches_are_evaluated(
    tmp_path: Path,
) -> None:
    samples = open_arrays(in_npz(values(), tmp_path), SPECS)
    batch = whole_batch(samples, np.array([2, -1]), later=False)
    assert (batch.targets[1] == -100).all()
    assert num_evaluated(samples, 4) == N
    without = {name: spec for name, spec in SPECS.items() if name != "targets"}
    assert num_evaluated(ArraySamples(RANDOM, without, None), 100) == 1000
    assert (
        whole_batch(ArraySamples(RANDOM, without, None), np.arange(3), later=False).num_targets()
        == 3
    )


def test_random_arrays_are_a_function_of_the_sample() -> None:
    samples = open_arrays(RANDOM, SPECS)
    whole = samples.rows(np.arange(100))
    some = samples.rows(np.array([7, 99]))
    for name, array in some.items():
        assert np.array_equal(array, whole[name][[7, 99]])
    assert whole["label"].min() == 0
    assert whole["label"].max() == 4
    assert not np.array_equal(whole["image"][0], whole["image"][1])


def test_sources_of_arrays_are_mixed(tmp_path: Path) -> None:
    stored = open_arrays(in_npz(values(), tmp_path), SPECS)
    mixed = MixtureSamples((stored, open_arrays(RANDOM, SPECS)), make_mixture_sampler((0.5, 0.5)))
    read = mixed.read(np.array([N + 3, 2]))
    assert read.fields is not None
    assert read.fields["label"][1] == values()["label"][2]
    assert np.array_equal(read.inputs[1], values()["image"][2])
    proved = batch_of(mixed, np.array([N + 3, 2]), later=False)
    assert proved.fields is not None
    assert np.array_equal(proved.fields["label"].numpy(), read.fields["label"])


def without(name: str) -> Callable[[Values], None]:
    return lambda found: found.pop(name)  # type: ignore[return-value]


def put(name: str, array: NDArray[Any]) -> Callable[[Values], None]:
    return lambda found: found.update({name: array})


FAULTS = [
    (without("label"), "has no array label, which the model declares in INPUTS"),
    (
        put("image", np.zeros((N, 3, 2), np.float32)),
        r"another shape .*\[6, 3, 2\].*\[samples, 2, 3\]",
    ),
    (put("label", np.zeros((N, 1), np.int64)), r"another shape .*\[6, 1\]; need \[samples\]"),
    (put("image", np.zeros((N, 2, 3))), "numbers that float32 does not hold .got float64"),
    (put("label", np.full(N, 5)), "array label is out of range at sample 0 .got 5; need 0 to 4"),
    (put("label", np.full(N, -100)), "array label is out of range at sample 0 .got -100"),
    (put("targets", np.full((N, 4), -1)), "out of range at sample 0 .got -1; need 0 to 6, or -100"),
    (put("label", np.zeros(N + 1, np.int64)), "different numbers of samples .got image 6, label 7"),
]


@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_arrays_that_do_not_fit_the_model_are_rejected(
    change: Callable[[Values], None], said: str, tmp_path: Path
) -> None:
    found = values()
    change(found)
    with pytest.raises(DataError, match=said) as error:
        open_arrays(in_npz(found, tmp_path), SPECS)
    assert len(str(error.value).splitlines()) == 1


def test_damaged_missing_and_other_sources_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    file.write_bytes(b"PK no archive")
    with pytest.raises(DataError, match="cannot be read"):
        open_arrays(str(file), SPECS)
    for damaged in ("a.safetensors", "image.npy"):
        (tmp_path / damaged).write_bytes(b"\x93NUMPY damaged")
    for source in (tmp_path / "a.safetensors", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            open_arrays(str(source), SPECS)
    (tmp_path / "image.npy").unlink()
    with pytest.raises(DataError, match="no such file or folder"):
        open_arrays(str(tmp_path / "b.npz"), SPECS)
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(DataError, match="is no source of arrays"):
        open_arrays(str(tmp_path / "c.txt"), SPECS)
    objects = {**values(), "label": np.array([{}] * N, dtype=object)}
    with pytest.raises(DataError, match="cannot be read"):
        open_arrays(in_npz(objects, tmp_path), SPECS)


def test_the_range_of_large_arrays_is_checked_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays_module, "MAX_CHECKED_BYTES", 0)
    found = values()
    found["label"][3] = 9
    samples = open_arrays(in_folder(found, tmp_path), SPECS)
    samples.read(np.array([0, 1, 2]))
    with pytest.raises(DataError, match=r"out of range at sample 3 .got 9"):
        samples.read(np.array([2, 3]))


PROBLEMS = [
    ({}, "not a mapping"),
    ({"targets": InputSpec((), "int64")}, "begins with targets"),
    ({"x": InputSpec(), "targets": InputSpec()}, "no whole numbers"),
    ({"x": InputSpec((0,))}, "no tuple of sizes above 0"),
    ({"x": InputSpec(dtype="complex64")}, "dtype 'complex64' is none of"),
    ({"x": InputSpec(below=3)}, "below 3 is for whole numbers"),
    ({"x": "float32"}, "not weft.InputSpec"),
    ({"not a name": InputSpec()}, "is no name"),
]


@pytest.mark.parametrize(("specs", "said"), PROBLEMS)
def test_inputs_that_are_no_specs_are_named(specs: object, said: str) -> None:
    assert said in str(spec_problem(specs))
    assert spec_problem(SPECS) is None
