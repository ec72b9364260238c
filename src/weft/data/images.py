"""Grey images with their classes: MNIST's IDX files, or scikit-learn's digits where there are none."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import math
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.files import KEY, READ_ERRORS, read_fault
from weft.errors import DataError, Fault, counted
from weft.small_files import UnreadableFile, open_regular

Bytes = NDArray[np.uint8]

DIGITS_SIZE = 28
"""Height and width to which the 8 x 8 digits are enlarged: MNIST's."""
GZIP_MAGIC = b"\x1f\x8b"
MAX_IDX_BYTES = 2**30
"""Size of an IDX file, decompressed: it is read into memory."""
IDX_UINT8 = 0x08
IDX_IMAGES, IDX_LABELS = "idx3", "idx1"


@dataclass(frozen=True)
class LabelledImages:
    """images_N1HW and labels_N, both uint8, and a name for messages."""

    name: str
    images: Bytes
    labels: Bytes

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_bytes(self) -> int:
        """Size of images and labels."""
        return self.images.nbytes + self.labels.nbytes

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the images' bytes, then the labels'."""
        return hashlib.sha256(self.images.tobytes() + self.labels.tobytes()).hexdigest()

    def check(self, *, image_size: int, classes: int) -> None:
        """Check sizes and labels against a model.

        Raises:
            DataError: with every fault.
        """
        faults = []
        height, width = self.images.shape[2:]
        if (height, width) != (image_size, image_size):
            what = f"{self.name}: images of another size"
            fix = f"--model.image_size {height}"
            if height != width:
                fix = "crop or pad the images to squares"
            faults.append(
                Fault(KEY, what, got=f"{height} x {width}", need=str(image_size), fix=fix)
            )
        (out_of_range,) = np.nonzero(self.labels >= classes)
        if out_of_range.size:
            first = int(out_of_range[0])
            largest = int(self.labels.max())
            fault = Fault(
                KEY,
                f"{self.name}: label out of range at image {first}",
                got=str(self.labels[first]),
                need=f"below model.classes = {classes}",
                fix=f"--model.classes {largest + 1}",
            )
            faults.append(fault)
        if faults:
            raise DataError(*faults)


def check_digits() -> None:
    """Check that scikit-learn is installed, without loading the digits.

    Raises:
        DataError: scikit-learn is missing.
    """
    if importlib.util.find_spec("sklearn") is None:
        fix = "pip install 'weft-train[digits]', or name a folder with MNIST's IDX files"
        raise DataError(
            Fault(KEY, "'digits' comes with scikit-learn, which is not installed", fix=fix)
        )


def digits() -> LabelledImages:
    """scikit-learn's 1,797 digits: 8 x 8 in 17 greys, every pixel enlarged to 3 x 3, padded to 28 x
    28 as MNIST's are.

    Raises:
        DataError: scikit-learn is missing.
    """
    check_digits()
    from sklearn.datasets import load_digits  # an extra, and a second to import

    found: Any = load_digits()
    grey_NHW = found.images * (255 / 16)
    enlarged_NHW = np.kron(grey_NHW, np.ones((1, 3, 3)))
    bytes_NHW = enlarged_NHW.round().astype(np.uint8)
    border = (DIGITS_SIZE - bytes_NHW.shape[1]) // 2
    borders = (border, border)
    images_NHW = np.pad(bytes_NHW, ((0, 0), borders, borders))
    return LabelledImages(
        "digits", images=images_NHW[:, None], labels=found.target.astype(np.uint8)
    )


def read_pair(source: str) -> LabelledImages:
    """Images and labels of a folder in MNIST's IDX format (gzipped or not); its training pair,
    where there are several.

    `source` may be the images' file as well.

    Raises:
        DataError: no such pair, a broken file, or counts that differ.
    """
    path = Path(os.path.expanduser(source))
    if not path.exists():
        fix = "check the path; --data.source digits needs no files"
        raise DataError(
            Fault(
                KEY,
                "no such file or folder",
                got=repr(source),
                need="a folder with IDX images and labels",
                fix=fix,
            )
        )
    images_file, labels_file = find_pair(path)
    images = read_idx(images_file, num_dims=3)
    labels = read_idx(labels_file, num_dims=1)
    if len(images) != len(labels) or not len(images):
        num_images = len(images)
        num_labels = len(labels)
        got = f"{num_images} in {images_file.name}, {num_labels} in {labels_file.name}"
        raise DataError(
            Fault(
                KEY,
                "images and labels differ in number",
                got=got,
                need="equal numbers, at least one",
                fix="download both files again",
            )
        )
    return LabelledImages(name=str(images_file), images=images[:, None], labels=labels)


def find_pair(path: Path) -> tuple[Path, Path]:
    """Files with images and with their labels; a training pair is preferred."""
    folder = path if path.is_dir() else path.parent
    names = sorted(file.name for file in folder.iterdir())
    candidates = [path.name]
    if path.is_dir():
        candidates = [name for name in names if "images" in name and IDX_IMAGES in name]
    training_first = sorted(candidates, key=lambda name: not name.startswith("train"))
    for name in training_first:
        labels_name = name.removesuffix(".gz")
        labels_name = labels_name.replace("images", "labels")
        labels_name = labels_name.replace(IDX_IMAGES, IDX_LABELS)
        for candidate in (labels_name, f"{labels_name}.gz"):
            if candidate in names and candidate != name:
                return folder / name, folder / candidate
    need = "train-images-idx3-ubyte and train-labels-idx1-ubyte, or such with .gz"
    raise DataError(
        Fault(
            KEY,
            "no pair of IDX files",
            got=repr(str(path)),
            need=need,
            fix="--data.source digits, or a folder with these files",
        )
    )


def read_idx(file: Path, *, num_dims: int) -> Bytes:
    """One IDX file of bytes: two zeros, type, number of dims, big-endian dims, then the values.

    Raises:
        DataError: another format, or a truncated file.
    """
    data = _read_decompressed(file)
    if len(data) > MAX_IDX_BYTES:
        need = f"at most {MAX_IDX_BYTES} bytes, decompressed"
        raise DataError(Fault(KEY, f"{file} is too large", need=need, fix="split it"))
    magic = struct.pack(">HBB", 0, IDX_UINT8, num_dims)
    if data[:4] != magic:
        got = f"magic {data[:4].hex()}"
        raise DataError(
            Fault(
                KEY,
                f"{file} is not an IDX file of {num_dims} dims",
                got=got,
                need=magic.hex(),
                fix="download the file again",
            )
        )
    header_size = 4 + 4 * num_dims
    if len(data) < header_size:
        raise DataError(
            Fault(
                KEY,
                f"{file} ends inside its header",
                got=counted(len(data), "byte"),
                need=f"{header_size} bytes",
                fix="download the file again",
            )
        )
    dims = struct.unpack(f">{num_dims}I", data[4:header_size])
    size = header_size + math.prod(dims)
    if len(data) != size:
        flaw = "is truncated" if len(data) < size else "is too long"
        dims_text = " x ".join(map(str, dims))
        fault = Fault(
            KEY,
            f"{file} {flaw}",
            got=counted(len(data), "byte"),
            need=f"{size} for {dims_text}",
            fix="fetch the file again",
        )
        raise DataError(fault)
    values = np.frombuffer(data, np.uint8, offset=header_size)
    return values.reshape(dims)


def _read_decompressed(file: Path) -> bytes:
    """The bytes of a file, and one more than `MAX_IDX_BYTES` of a larger one."""
    try:
        with open_regular(file) as raw:
            is_compressed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            if not is_compressed:
                return raw.read(MAX_IDX_BYTES + 1)
            with gzip.open(raw) as source:
                return source.read(MAX_IDX_BYTES + 1)
    except UnreadableFile as error:
        fault = Fault(KEY, "cannot read the file", got=error.what, fix=repr(str(file)))
        raise DataError(fault) from None
    except READ_ERRORS as error:
        raise DataError(read_fault(file, error)) from None
