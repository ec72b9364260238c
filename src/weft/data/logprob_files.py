"""Samples of preference pairs with the log-probabilities of their targets under a reference model, and the file of these.

OUT/reference/train.bin    logprobs_NS float64, little-endian: N samples of S positions, 0 where nothing is a target
OUT/reference/train.json   format, shape, SHA-256 of the file, and of the data that it is of
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.order import Ints
from weft.data.samples import SampleArrays, Samples
from weft.errors import DataError, Fault
from weft.small_files import MIB, UnreadableFile, open_regular, read_json_object

FOLDER = "reference"
FORMAT = 1
DTYPE = np.dtype("<f8")
MAX_ENTRIES = 2**28
"""Log-probabilities that every rank keeps in memory, 2 GiB."""
KEY = "dpo"

Logprobs = NDArray[np.float64]


@dataclass(frozen=True)
class ReferencedSamples:
    """Samples with logprobs_NS of their targets under the reference model."""

    samples: Samples
    logprobs: Logprobs

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.samples.num_samples

    def at(self, places: Ints, *, seed: int) -> Ints:
        """The same permutation as the samples' own."""
        return self.samples.at(places, seed=seed)

    def read(self, samples: Ints) -> SampleArrays:
        """The samples with these numbers and their log-probabilities."""
        return replace(self.samples.read(samples), references=self.logprobs[samples.ravel()])

    def place(self, sample: int) -> dict[str, object]:
        """The same place as the samples' own."""
        return self.samples.place(sample)

    def facts(self) -> dict[str, object]:
        """The same facts as the samples' own."""
        return self.samples.facts()


def check_size(samples: Samples, *, seq_len: int) -> None:
    """Check that the log-probabilities fit into memory.

    Raises:
        DataError: they do not.
    """
    size = samples.num_samples * seq_len
    if size > MAX_ENTRIES:
        got = f"{samples.num_samples} samples of {seq_len} positions"
        need = f"at most {MAX_ENTRIES:,} positions"
        raise DataError(
            Fault(KEY, "too many reference log-probabilities", got=got, need=need, fix="less data")
        )


def write_references(
    run_folder: Path, name: str, logprobs: Logprobs, data: Mapping[str, object]
) -> None:
    """Write the file of a data source; it is complete or absent.

    Args:
        data: facts of the samples.
    """
    folder = run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    content = np.ascontiguousarray(logprobs, dtype=DTYPE).tobytes()
    facts = {
        "format": FORMAT,
        "shape": list(logprobs.shape),
        "sha256": hashlib.sha256(content).hexdigest(),
        "data_sha256": data["sha256"],
    }
    _write_synced(folder / f"{name}.bin", content)
    text = json.dumps(facts, indent=1)
    _write_synced(folder / f"{name}.json", f"{text}\n".encode())


def read_references(
    run_folder: Path, name: str, *, shape: tuple[int, int], data: Mapping[str, object]
) -> Logprobs:
    """The log-probabilities of a data source.

    Raises:
        DataError: there is no file, it is damaged, or of other data.
    """
    folder = run_folder / FOLDER
    file = folder / f"{name}.bin"
    facts = _read_facts(folder / f"{name}.json")
    expected: dict[str, Any] = {
        "format": FORMAT,
        "shape": list(shape),
        "data_sha256": data["sha256"],
    }
    for key, value in expected.items():
        if facts.get(key) != value:
            what = f"{file} holds log-probabilities of other data: {key} differs"
            raise DataError(
                Fault(KEY, what, got=str(facts.get(key)), need=str(value), fix=_fix(folder))
            )
    size = shape[0] * shape[1] * DTYPE.itemsize
    try:
        with open_regular(file, within=folder) as source:
            content = source.read(size + 1)
    except UnreadableFile as error:
        raise DataError(error.fault(KEY, fix=_fix(folder))) from None
    if hashlib.sha256(content).hexdigest() != facts.get("sha256"):
        what = f"{file} is damaged: its SHA-256 is another than its .json states"
        raise DataError(Fault(KEY, what, fix=_fix(folder)))
    return np.frombuffer(content, DTYPE).reshape(shape)


def _read_facts(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file, max_bytes=MIB, within=file.parent)
    except UnreadableFile as error:
        raise DataError(error.fault(KEY, fix=_fix(file.parent))) from None


def _fix(folder: Path) -> str:
    return f"copy {folder} from the run's own folder, or start a new run without --resume"


def _write_synced(file: Path, content: bytes) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with temporary.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(file)
