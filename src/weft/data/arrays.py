"""Named arrays of samples: an .npz or .safetensors file, a folder of .npy files, or random ones that try a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.lib.format import open_memmap, read_array
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from weft.core.input_spec import TARGETS, InputSpec
from weft.data.files import KEY, READ_ERRORS
from weft.data.order import Ints, Order, epoch_order
from weft.data.samples import ARRAYS, HASH_DIGITS, IGNORE, SampleArrays
from weft.data.verify import block_checksums
from weft.errors import DataError, Fault

Arrays = Mapping[str, NDArray[Any]]

RANDOM = "random"
"""Source: numbers drawn by the specs of a model, to try it before there is data."""
NUM_RANDOM = 1024
RANDOM_SEED = 0
NPY, NPZ, SAFETENSORS = ".npy", ".npz", ".safetensors"
NEED = "an .npz or .safetensors file, or a folder with one NAME.npy for each array"
MAX_CHECKED_BYTES = 2**28
"""Arrays up to this size are checked for their range at the start; larger ones when they are read."""


def drawn_arrays(samples: Ints, specs: Mapping[str, InputSpec], *, seed: int) -> Arrays:
    """Random arrays of these samples: normal numbers, whole ones below `spec.below`; a function of the
    seed, the name and the number of the sample.
    """
    found: dict[str, NDArray[Any]] = {}
    for name, spec in specs.items():
        rows = [_drawn(name, spec, sample, seed) for sample in samples.ravel().tolist()]
        found[name] = np.stack(rows).astype(spec.dtype)
    return found


def _drawn(name: str, spec: InputSpec, sample: int, seed: int) -> NDArray[Any]:
    # by the number of the sample, not by its place in a batch: any layout draws the same row
    generator = np.random.default_rng([seed, sample, *name.encode()])
    if spec.is_whole:
        most = 2 if spec.dtype in ("bool", "int8") else 128
        return generator.integers(0, spec.below or most, size=spec.shape)
    return np.asarray(generator.standard_normal(spec.shape))


def array_files(source: str, specs: Mapping[str, InputSpec]) -> Iterator[Path]:
    """The files that hold the arrays of a source."""
    path = Path(source).expanduser()
    if source == RANDOM:
        return
    if path.is_dir():
        yield from (path / f"{name}{NPY}" for name in specs)
    else:
        yield path


def open_arrays(
    source: str, specs: Mapping[str, InputSpec], *, order: Order = "shuffled"
) -> ArraySamples:
    """The samples of a source, checked against what a model declares.

    Raises:
        DataError: a file is missing or broken, an array is missing or of another shape or type, arrays
            have different numbers of samples, or whole numbers are out of range.
    """
    if source == RANDOM:
        return ArraySamples(source, specs, None, order)
    stored = _stored(source, specs)
    faults = list(_faults(source, stored, specs))
    if faults:
        raise DataError(*faults)
    return ArraySamples(source, specs, stored, order)


def _stored(source: str, specs: Mapping[str, InputSpec]) -> Arrays:
    """The arrays of a source; those of .npy files stay on disk until they are read."""
    path = Path(source).expanduser()
    if not path.exists():
        fix = f"--{KEY} with {NEED}, or {RANDOM}"
        raise DataError(Fault(KEY, "no such file or folder", got=source, fix=fix))
    try:
        if path.is_dir():
            files = {name: path / f"{name}{NPY}" for name in specs}
            present = {name: file for name, file in files.items() if file.exists()}
            return {name: open_memmap(file, mode="r") for name, file in present.items()}
        if path.suffix == NPZ:
            return dict(_read_npz(path, specs))
        if path.suffix == SAFETENSORS:
            with safe_open(path, framework="numpy") as opened:
                names = set(opened.keys())
                return {name: opened.get_tensor(name) for name in specs if name in names}
    except (*READ_ERRORS, BadZipFile, SafetensorError, RuntimeError, ValueError) as error:
        what = f"{source} cannot be read: {type(error).__name__}: {error}"
        raise DataError(Fault(KEY, what, need=NEED, fix="write it anew")) from None
    raise DataError(Fault(KEY, "is no source of arrays", got=source, need=NEED))


def _read_npz(path: Path, names: Iterable[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Those of the named arrays that an .npz file has, which NumPy reads without unpickling."""
    with ZipFile(path) as archive:
        members = set(archive.namelist())
        for name in names:
            if f"{name}{NPY}" in members:
                with archive.open(f"{name}{NPY}") as member:
                    yield name, read_array(member)


def _faults(source: str, stored: Arrays, specs: Mapping[str, InputSpec]) -> Iterator[Fault]:
    missing = [name for name in specs if name not in stored]
    if missing:
        names = ", ".join(missing)
        what = f"{source} has no array {names}, which the model declares in INPUTS"
        yield Fault(KEY, what, got=", ".join(stored) or "none of them", need=", ".join(specs))
        return
    for name, spec in specs.items():
        array = stored[name]
        if array.ndim == 0 or array.shape[1:] != spec.shape:
            need = f"[samples, {', '.join(map(str, spec.shape))}]".replace(", ]", "]")
            fix = "store it so, or change INPUTS"
            what = f"{source}: array {name} has another shape"
            yield Fault(KEY, what, got=str(list(array.shape)), need=need, fix=fix)
        elif not np.can_cast(array.dtype, spec.dtype, "safe"):
            what = f"{source}: array {name} has numbers that {spec.dtype} does not hold"
            fix = f"store it as {spec.dtype}, or change INPUTS"
            yield Fault(KEY, what, got=str(array.dtype), need=spec.dtype, fix=fix)
        elif array.nbytes <= MAX_CHECKED_BYTES:
            yield from _range_faults(source, name, array, spec, samples=range(len(array)))
    counts = {name: len(stored[name]) for name in specs if stored[name].ndim}
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{name} {count}" for name, count in counts.items())
        yield Fault(KEY, f"{source}: arrays have different numbers of samples", got=got)
    elif counts and not min(counts.values()):
        yield Fault(KEY, f"{source} holds no sample", need="one or more")


def _range_faults(
    source: str, name: str, array: NDArray[Any], spec: InputSpec, *, samples: Sequence[int]
) -> Iterator[Fault]:
    """The first number that is out of range; targets that do not count are in it.

    Args:
        samples: numbers of the rows of the array.
    """
    if spec.below is None or not array.size:
        return
    is_out = (array < 0) | (array >= spec.below)
    if name == TARGETS:
        is_out &= array != IGNORE
    if is_out.any():
        place = np.argwhere(is_out)[0]
        what = f"{source}: array {name} is out of range at sample {samples[place[0]]}"
        need = f"0 to {spec.below - 1}" + (f", or {IGNORE}" if name == TARGETS else "")
        yield Fault(KEY, what, got=str(array[tuple(place)]), need=need, fix="change it, or INPUTS")


@dataclass(frozen=True)
class ArraySamples:
    """Sample i is the i-th row of every array.

    Attributes:
        source: file, folder or `RANDOM`.
        specs: what the model declares; what its first block reads comes first.
        stored: the arrays; None: they are drawn.
    """

    source: str
    specs: Mapping[str, InputSpec]
    stored: Arrays | None
    order: Order = "shuffled"

    @property
    def num_samples(self) -> int:
        """Rows of every array."""
        if self.stored is None:
            return NUM_RANDOM
        return len(next(iter(self.stored.values())))

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Epoch after epoch, each in its own order."""
        return epoch_order(places, self.num_samples, seed=seed, order=self.order)

    def read(self, samples: Ints) -> SampleArrays:
        """Rows of every array, in one batch dimension.

        Raises:
            DataError: a whole number is out of range.
        """
        arrays = self.rows(samples.ravel())
        first, *others = arrays
        zeros_B = np.zeros(samples.size, dtype=np.int64)
        targets = arrays[TARGETS].astype(np.int64) if TARGETS in arrays else zeros_B.copy()
        fields = {name: arrays[name] for name in others if name != TARGETS}
        return SampleArrays(arrays[first], targets, zeros_B, fields=fields)

    def rows(self, numbers: Ints) -> Arrays:
        """These rows of every array, by name, of the declared types."""
        if self.stored is None:
            return drawn_arrays(numbers, self.specs, seed=RANDOM_SEED)
        found: dict[str, NDArray[Any]] = {}
        for name, spec in self.specs.items():
            rows = np.asarray(self.stored[name][numbers])
            # of a large array nothing was checked at the start
            if self.stored[name].nbytes > MAX_CHECKED_BYTES:
                faults = list(
                    _range_faults(self.source, name, rows, spec, samples=numbers.tolist())
                )
                if faults:
                    raise DataError(*faults)
            found[name] = rows.astype(spec.dtype)
        return found

    def place(self, sample: int) -> dict[str, object]:
        """The sample's row in the arrays of the source."""
        return {"sample": sample, "source": self.source, "row": sample}

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the specs and of checksums of blocks of the files."""
        digest = hashlib.sha256(repr(dict(self.specs)).encode())
        for file in array_files(self.source, self.specs):
            digest.update(repr(block_checksums(file)).encode())
        return digest.hexdigest()

    def facts(self) -> dict[str, object]:
        """Source, arrays, bytes, samples, hash."""
        arrays = {name: spec.text for name, spec in self.specs.items()}
        num_bytes = sum(array.nbytes for array in (self.stored or {}).values())
        return {
            "source": self.source,
            ARRAYS: arrays,
            "bytes": num_bytes,
            "samples": self.num_samples,
            "sha256": self.sha256[:HASH_DIGITS],
        }
