"""What a script gives as data, written as files that a run reads: tokens, texts, records, named arrays, images.

Note [Given data]
    Data that a script gives are read once, before the first step, and written into the run folder:
    so every layout reads the same samples in the same order, and a resume continues with them. Of
    what may have no end no more is read than the steps of the run need.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import struct
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from numbers import Number
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, TYPE_CHECKING, Any

from weft.checkpoint.resume import starts_new
from weft.config.run import Run
from weft.data.given_rows import IDS, KEY, LABELS, GivenRows
from weft.data.images import IDX_UINT8
from weft.data.prepare import PrepareOptions, prepare
from weft.data.prepared import TEXT, TOKENS
from weft.data.record_sources import AUTO
from weft.data.samples import IGNORE
from weft.errors import Fault, UserError, first_line
from weft.start.given_items import GivenItems, given_items

if TYPE_CHECKING:
    import numpy as np

TOKEN_FILE = "tokens.bin"  # noqa: S105 - of ids
"""File of a run folder with the tokens that were given as an array."""
ARRAYS, IMAGES, PREPARED = "arrays", "images", "prepared"
"""Folders of a run folder with what was given: an .npy file for each array, IDX files, tokens."""
FACTS = "given.json"
"""File of a run folder: how much was read of what may have no end."""
MAX_TOKENS = 2**32
"""Tokens are stored in at most four bytes."""
NO_TARGET = (IGNORE, -1)
"""Numbers that scripts write where a target does not count."""
NEED = (
    "a data source; tokens: an array, tensor or list of whole numbers in one dimension; arrays by "
    "name; or a dataset, DataLoader or list of texts, records, rows of tokens or arrays"
)


class TemporaryFolder:
    """A folder that is removed with this object."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="weft-data-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class StoredData:
    """Data in a folder, which is removed with this object unless it is moved.

    Attributes:
        place: of the files: a temporary folder, or that of a run which is resumed.
        name: of the file or folder that the run reads.
        keys: of the config, beside `data.source`.
        facts: how much was wanted of what may have no end, and whether it ended before; None: all
            was read.
    """

    place: TemporaryFolder | Path
    name: str
    keys: Mapping[str, Any]
    facts: Mapping[str, Any] | None = None

    def values(self, out: Path | None = None) -> dict[str, Any]:
        """The keys of a run that reads the data where they are, or in its folder."""
        place = self.place if isinstance(self.place, Path) else self.place.path
        return {"data.source": str((out or place) / self.name), **self.keys}

    def moved(self, out: Path) -> dict[str, Any]:
        """Move the data into a run folder; the keys that name them there. Ranks that join a run have
        read the same, of which one copy is kept.
        """
        target = out / self.name
        if isinstance(self.place, TemporaryFolder):
            own = out / f".{self.name}.{os.getpid()}"
            out.mkdir(parents=True, exist_ok=True)
            shutil.move(self.place.path / self.name, own)
            if target.exists() and not _is_same(own, target):
                _remove(target)
            try:
                own.rename(target)
            except OSError:  # another rank was first
                _remove(own)
            if self.facts is not None:
                (out / FACTS).write_text(json.dumps(self.facts))
        return self.values(out)


def _is_same(one: Path, other: Path) -> bool:
    if one.is_file():
        return other.is_file() and filecmp.cmp(one, other, shallow=False)
    names = [file.name for file in one.iterdir()]
    if {*names} != {file.name for file in other.iterdir()}:
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def store_given(data: Any, run: Run) -> StoredData:
    """Write what a script gives as data for a run; see Note [Given data].

    Raises:
        UserError: it is no data, or none that the model reads.
    """
    kind = run.model.kind
    if isinstance(data, Mapping):
        _check_mapping(data, kind)
        return _stored(ARRAYS, {}, lambda out: _write_mapping(data, out))
    if _is_tokens(data):
        return _stored_tokens(data, kind)
    given = given_items(data, seed=run.seed)
    if given is None:
        raise UserError(_no_data(type(data).__name__))
    reused = _of_run_folder(run, given)
    if reused is not None:
        return reused
    counted = _Counted(given.items)
    try:
        first = next(counted)
    except StopIteration:
        what = f"{given.name} is empty"
        raise UserError(Fault(KEY, what, got="no item", need="one or more")) from None
    name, write = _writer(first, chain((first,), counted), run, given)
    keys = {"data.order": given.order} if given.order == "stored" else {}
    stored = _stored(name, keys, write)
    if given.is_sized:
        return stored
    facts = {"name": name, "wanted": _wanted(run), "has_ended": counted.has_ended}
    return replace(stored, facts=facts)


def _writer(
    first: Any, items: Iterator[Any], run: Run, given: GivenItems
) -> tuple[str, Callable[[Path], object]]:
    """What is written of items for a model: its name, and a function of its place."""
    if run.model.kind == "tokens":
        options = _prepare_options(first, run, given)
        rows = GivenRows(_fields(items, given.name, options.text_field), given.name)
        return PREPARED, partial(prepare, options, given=rows)
    kept = islice(items, None if given.is_sized else _wanted(run))
    if run.model.kind == "images":
        return IMAGES, partial(_write_images, kept, dataset=given.name)
    names = tuple(run.model.input_specs())
    return ARRAYS, partial(_write_rows, kept, dataset=given.name, names=names)


@dataclass
class _Counted:
    """An iterator that knows whether it has ended."""

    items: Iterator[Any]
    has_ended: bool = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.items)
        except StopIteration:
            self.has_ended = True
            raise


def _stored(name: str, keys: Mapping[str, Any], write: Callable[[Path], Any]) -> StoredData:
    place = TemporaryFolder()
    write(place.path / name)
    return StoredData(place, name, keys)


def _wanted(run: Run) -> int | None:
    """Tokens that the steps of a run read, of images and arrays samples; None: all, for epochs."""
    if run.epochs is not None:
        return None
    num_samples = run.steps * run.batch.global_size
    return num_samples * run.data.seq_len + 1 if run.model.kind == "tokens" else num_samples


def _of_run_folder(run: Run, given: GivenItems) -> StoredData | None:
    """The data that a run which is resumed has read of what may have no end."""
    out = Path(run.out or "")
    if given.is_sized or starts_new(run.resume, run.out) or not (out / FACTS).exists():
        return None
    facts = json.loads((out / FACTS).read_text())
    wanted = _wanted(run)
    if not facts["has_ended"] and (wanted is None or facts["wanted"] < wanted):
        what = (
            f"the run has read of {given.name} what {facts['wanted']:,} of its steps' samples need"
        )
        fix = "resume with the steps of its start"
        need = f"at most {facts['wanted']:,}"
        got = "epochs" if wanted is None else f"{wanted:,}"
        raise UserError(Fault("steps", what, got=got, need=need, fix=fix))
    return StoredData(out, facts["name"], {"data.order": "stored"})


def _check_mapping(data: Mapping[Any, Any], kind: str) -> None:
    """Arrays by name, for a model that names them; their shapes are checked where they are read."""
    for name, value in data.items():
        if not isinstance(name, str) or not name.isidentifier() or not _has_numbers(value):
            got = f"{name!r}: {type(value).__name__}"
            need = "names with arrays or tensors on the CPU, of one row a sample"
            raise UserError(Fault(KEY, "is no mapping of arrays", got=got, need=need))
    if kind != "arrays":
        what = f"gives arrays by name, and the model reads {kind}"
        fix = "name them in INPUTS of the model: see docs/your-model.md"
        raise UserError(Fault(KEY, what, fix=fix))


def _has_numbers(value: Any) -> bool:
    """Whether NumPy reads an object as an array of numbers; tensors of other devices and those that
    need gradients are none.
    """
    import numpy as np

    try:
        return hasattr(value, "__array__") and np.asarray(value).dtype.kind in "biuf"
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_tokens(data: Any) -> bool:
    """Whether an object is an array, a tensor, or a list, tuple or range of numbers."""
    if isinstance(data, (list, tuple)):
        return bool(data) and all(isinstance(each, Number) for each in data)
    return isinstance(data, (range, array)) or hasattr(data, "__array__")


def _stored_tokens(data: Any, kind: str) -> StoredData:
    """An array of tokens, which has one dimension and whole numbers."""
    import numpy as np

    try:
        tokens = np.asarray(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(_no_data(f"{type(data).__name__}: {first_line(error)}")) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size or kind != "tokens":
        raise UserError(_no_data(f"shape {list(tokens.shape)} of {tokens.dtype}"))
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= MAX_TOKENS:
        got = f"{least} to {most}"
        what, need = "has numbers that are no tokens", "0 or more, below 2**32"
        raise UserError(Fault(KEY, what, got=got, need=need))
    dtype = "uint16" if most < 2**16 else "uint32"
    keys = {"data.token_dtype": dtype}
    return _stored(TOKEN_FILE, keys, lambda out: tokens.astype(dtype).tofile(out))


def _no_data(got: str) -> Fault:
    return Fault(KEY, "is no data", got=got, need=NEED)


def _prepare_options(first: Any, run: Run, given: GivenItems) -> PrepareOptions:
    """How items of tokens are prepared, by the first of them."""
    data = run.data
    if isinstance(first, str):
        kind = TEXT
    elif not isinstance(first, Mapping) or IDS in first:
        kind = TOKENS
    else:
        kind = AUTO if data.format == TEXT and data.text_field not in first else data.format
    return PrepareOptions(
        inputs=(given.name,),
        tokenizer=data.tokenizer,
        vocab=run.model.axis_sizes()["vocab"],
        text_field=data.text_field,
        valid=0.0,
        format=kind,  # type: ignore[arg-type]  # of the literals of both
        chat_template=data.chat_template if kind not in (TEXT, TOKENS) else None,
        max_tokens=None if given.is_sized else _wanted(run),
    )


def _fields(items: Iterator[Any], name: str, text_field: str) -> Iterator[Mapping[str, Any]]:
    """Items as rows: texts, mappings, rows of tokens, or pairs of rows of tokens and targets."""
    for number, item in enumerate(items):
        is_pair = isinstance(item, (tuple, list)) and len(item) == 2 and not _is_tokens(item)
        if isinstance(item, str):
            yield {text_field: item}
        elif isinstance(item, Mapping):
            yield item
        elif is_pair:
            yield _row_of_pair(*item, where=f"{name}[{number}]")
        elif _is_tokens(item):
            yield {IDS: item}
        else:
            raise UserError(_no_data(f"{name} of {type(item).__name__}"))


def _row_of_pair(inputs: Any, targets: Any, *, where: str) -> Mapping[str, Any]:
    """Tokens and the tokens after them as one row with labels.

    Raises:
        UserError: targets are others than the next tokens.
    """
    import numpy as np

    if not (_is_tokens(inputs) and _is_tokens(targets)):
        got = f"{where}: {type(inputs).__name__} and {type(targets).__name__}"
        raise UserError(_no_data(got))
    x, y = np.asarray(inputs), np.asarray(targets)
    counts = ~np.isin(y, NO_TARGET)
    is_next = x.ndim == 1 and x.shape == y.shape and not (counts[:-1] & (x[1:] != y[:-1])).any()
    if not is_next:
        what = f"{where}: the targets are not the next tokens"
        fix = "name both in INPUTS of a model of your own: see docs/your-model.md"
        need = f"y[:-1] == x[1:], or {IGNORE} where a target does not count"
        raise UserError(Fault(KEY, what, got=f"{y.dtype} {list(y.shape)}", need=need, fix=fix))
    ids = np.concatenate([x, y[-1:]]) if counts[-1:].any() else x
    labels = np.concatenate([[IGNORE], np.where(counts, y, IGNORE)])[: len(ids)]
    return {IDS: ids, LABELS: labels}


def _write_mapping(arrays: Mapping[str, Any], folder: Path) -> None:
    import numpy as np

    folder.mkdir()
    for name, value in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(value))


@dataclass
class _NpyRows:
    """An .npy file to which rows of one shape are appended; its header is written again at the end."""

    file: IO[bytes]
    first: np.ndarray[Any, Any]
    num_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._write_header()

    def append(self, row: np.ndarray[Any, Any]) -> None:
        self.file.write(row.tobytes())
        self.num_rows += 1

    def end(self) -> None:
        self.file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        """The header, in which NumPy leaves room for a longer number of rows."""
        import numpy as np

        header = {
            "descr": np.lib.format.dtype_to_descr(self.first.dtype),
            "fortran_order": False,
            "shape": (self.num_rows, *self.first.shape),
        }
        np.lib.format.write_array_header_1_0(self.file, header)


def _write_rows(items: Iterator[Any], folder: Path, dataset: str, names: tuple[str, ...]) -> None:
    """Write samples of named arrays one after the other, each into its row of an .npy file.

    Raises:
        UserError: samples have arrays of different names, shapes or types.
    """
    import numpy as np

    folder.mkdir()
    with ExitStack() as stack:
        files: dict[str, _NpyRows] = {}
        for number, item in enumerate(items):
            where = f"sample {number} of the {dataset}"
            sample = {name: np.asarray(value) for name, value in _named(item, names, where).items()}
            if not files:
                for name, value in sample.items():
                    file = stack.enter_context((folder / f"{name}.npy").open("w+b"))
                    files[name] = _NpyRows(file, value)
            for name, value in sample.items():
                like = files[name].first if name in files else None
                if like is None or value.shape != like.shape or value.dtype != like.dtype:
                    need = ", ".join(
                        f"{key} {one.first.dtype} {list(one.first.shape)}"
                        for key, one in files.items()
                    )
                    got = f"{name} {value.dtype} {list(value.shape)}"
                    what = f"{where} has another array than sample 0"
                    raise UserError(Fault(KEY, what, got=got, need=need, fix="pad it to one shape"))
                files[name].append(value)
            missing = ", ".join(name for name in files if name not in sample)
            if missing:
                what = f"{where} lacks {missing}"
                raise UserError(Fault(KEY, what, fix="give every sample the same arrays"))
        for rows in files.values():
            rows.end()


def _named(item: Any, names: tuple[str, ...], where: str) -> Mapping[str, Any]:
    """The arrays of a sample by name; those of a tuple are in the order of INPUTS."""
    if isinstance(item, Mapping):
        found = {name: item[name] for name in names if name in item}
        if not found:
            got = ", ".join(map(str, item))
            raise UserError(Fault(KEY, f"{where} has other names", got=got, need=", ".join(names)))
        return found
    parts = item if isinstance(item, (tuple, list)) else (item,)
    if len(parts) != len(names):
        got, need = f"{len(parts)} parts", f"{len(names)}: {', '.join(names)}"
        what = f"{where} has other parts than INPUTS of the model"
        raise UserError(Fault(KEY, what, got=got, need=need, fix="give dicts of arrays by name"))
    return dict(zip(names, parts, strict=True))


def _write_images(items: Iterator[Any], folder: Path, *, dataset: str) -> None:
    """Write images with their classes as IDX files, whose headers get the number at the end.

    Raises:
        UserError: an item is no grey image of bytes with its class.
    """
    import numpy as np

    folder.mkdir()
    images_file, labels_file = (
        folder / f"train-{name}" for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    with images_file.open("wb") as images, labels_file.open("wb") as labels:
        shape: tuple[int, ...] | None = None
        number = 0
        for number, item in enumerate(items, start=1):
            parts = tuple(item.values()) if isinstance(item, Mapping) else item
            is_pair = isinstance(parts, (tuple, list)) and len(parts) == 2
            image, label = map(np.asarray, parts) if is_pair else (np.empty(0), np.empty(0))
            grey = image[0] if image.ndim == 3 and len(image) == 1 else image
            is_class = label.ndim == 0 and label.dtype.kind in "iu" and 0 <= int(label) < 256
            if (
                grey.ndim != 2
                or grey.dtype != np.uint8
                or not is_class
                or grey.shape != (shape or grey.shape)
            ):
                got = f"{image.dtype} {list(image.shape)}, {label.dtype} {list(label.shape)}"
                need = "a grey image, uint8 [H, W] of one size, and its class, 0 to 255"
                what = f"item {number - 1} of the {dataset} is no image with its class"
                fix = "leave out conversions to float; for other images name arrays in INPUTS"
                raise UserError(Fault(KEY, what, got=got, need=need, fix=fix))
            if shape is None:
                shape = grey.shape
                images.write(struct.pack(">4I", 0, 0, *shape))
                labels.write(struct.pack(">2I", 0, 0))
            images.write(grey.tobytes())
            labels.write(bytes([int(label)]))
        for file, dims in ((images, 3), (labels, 1)):
            file.seek(0)
            file.write(struct.pack(">2I", IDX_UINT8 << 8 | dims, number))
