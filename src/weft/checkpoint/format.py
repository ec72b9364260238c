"""Format of a checkpoint: file names, and the manifest as frozen values and canonical JSON. Pure: no torch.

step-000123/
    manifest.json            Manifest: what was trained, how far, and where every byte of every tensor lies
    manifest.json.sha256     as `sha256sum` writes it
    rank-00000.safetensors   pieces that rank 0 wrote: header, then tensors without gaps
    rank-00001.safetensors   ...
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from operator import sub
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.core.axes import Box

FORMAT = 2
"""Format version: increased when an older weft could not read, or would misread, what a newer one
writes.
"""

MANIFEST = "manifest.json"
DIGEST = "manifest.json.sha256"

StoredDtype = Literal[
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool"
]

DTYPES: Mapping[StoredDtype, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""torch's name of a type -> safetensors' name, bytes of one entry."""

Count = Annotated[int, Field(ge=0)]
Crc = Annotated[int, Field(ge=0, lt=2**32)]
FileName = Annotated[str, Field(pattern=r"^rank-\d{5,}\.safetensors$")]
TensorName = Annotated[str, Field(pattern=r"^[^/]+(/[^/]+)+$")]
"""`model/layer0.attn.q.weight`, `optim/exp_avg/layer0.attn.q.weight`: the section, then the global
parameter name.
"""


class Record(BaseModel):
    """A part of the manifest: frozen; unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    def to_json(self) -> str:
        """Canonical JSON: equal records give equal text."""
        text = json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return text + "\n"


class Facts(Record):
    """What was trained and how far: everything but the tensors."""

    step: Count
    """Number of finished optimizer steps."""
    seed: Count
    family: str
    architecture: dict[str, Any]
    """Fields of the family's config; with the family they determine names and shapes."""
    plan: dict[str, Any]
    """The plan that wrote it (`Plan` as JSON); reading does not depend on it."""
    run: dict[str, Any] = {}
    """The whole config of the run."""
    optimizer: dict[str, Any] = {}
    data: dict[str, Any] = {}
    """Facts about the data source."""
    position: dict[str, Any] = {}
    """Position in the data: steps and samples, and what guards have recorded (`weft.train.guard`)."""
    loss_scale: dict[str, Any] | None = None
    code: dict[str, str] = {}
    """Digests of the parts of users' code, by name (`weft.code.identity`); empty: all is weft's."""
    proof: dict[str, Any] = {}
    """Verdict of the proof before the first step; empty: there was none."""


class Piece(Record):
    """A box of one tensor that is contiguous in one file, row-major."""

    file: FileName
    at: Count
    """Offset of the first byte in the file."""
    lo: tuple[Count, ...]
    hi: tuple[Count, ...]
    crc32: tuple[Crc, ...]
    """Checksum of every block of `Manifest.block_bytes` bytes; the last block may be shorter."""

    @property
    def box(self) -> Box:
        """Position in the whole tensor."""
        return Box(self.lo, self.hi)


class Stored(Record):
    """One whole tensor and the pieces that cover it."""

    shape: tuple[Count, ...]
    dtype: StoredDtype
    pieces: tuple[Piece, ...]

    @property
    def num_entries(self) -> int:
        """Entries of the whole tensor."""
        return math.prod(self.shape)

    def num_bytes(self, piece: Piece) -> int:
        """Length of a piece in its file, bytes."""
        lengths: Iterator[int] = map(sub, piece.hi, piece.lo)
        return math.prod(lengths) * DTYPES[self.dtype][1]


class DataFile(Record):
    """One data file."""

    num_bytes: Count
    header_bytes: Count
    """Bytes before the first piece, including the eight bytes of the header length."""
    header_crc32: Crc


class RankManifest(Record):
    """Manifest of the file that one rank wrote; `commit` merges those of all ranks."""

    rank: Count
    block_bytes: Annotated[int, Field(gt=0)]
    files: dict[FileName, DataFile]
    tensors: dict[TensorName, Stored]
    digests: dict[TensorName, Crc] = {}
    """Of the tensors as they are in this rank's memory, see Note [Digests of tensors]."""


class Versions(Record):
    """Versions of the programs that wrote the checkpoint."""

    weft: str
    torch: str


class Manifest(Record):
    """Description of a checkpoint: facts, files, tensors and where their pieces are."""

    format: Annotated[int, Field(ge=1, le=FORMAT)] = FORMAT
    versions: Versions
    facts: Facts
    block_bytes: Annotated[int, Field(gt=0)]
    files: dict[FileName, DataFile]
    tensors: dict[TensorName, Stored]
    digests: dict[TensorName, Crc] = {}
    """Of the tensors as they were in memory, see Note [Digests of tensors]; of those that were not
    saved by a run, none.
    """

    @property
    def num_bytes(self) -> int:
        """Size of all data files, bytes."""
        return sum(file.num_bytes for file in self.files.values())

    def section(self, name: str) -> dict[str, Stored]:
        """Tensors below `name` ("model", "optim/exp_avg"), by their global parameter names."""
        found = {}
        for key, stored in self.tensors.items():
            section, _, parameter = key.rpartition("/")
            if section == name:
                found[parameter] = stored
        return found

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of all sections, sorted."""
        found = set()
        for name in self.tensors:
            section, _, _ = name.rpartition("/")
            found.add(section)
        return tuple(sorted(found))


def data_file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def rank_manifest_name(rank: int) -> str:
    """The rank's part of the manifest, until the commit."""
    return f"rank-{rank:05d}.json"


def digest_text(manifest: bytes) -> str:
    """Content of the checksum file, as `sha256sum manifest.json` prints it."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"
