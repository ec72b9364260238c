"""Documents of a data set that the library `datasets` can load: from its hub by name, or from a local folder.

    hf:allenai/c4,en            the split "train" of the configuration "en"
    hf:corpora/letters:test     the split "test" of a folder with data files

Rows are streamed one after the other; nothing is downloaded before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.data.documents import FIELD_KEY, ReadOptions, TextChunk, document_chunks, suggest_field
from weft.data.files import KEY
from weft.data.rows import MAX_ERROR_CHARS, Row
from weft.errors import DataError, Fault, first_line

SCHEME = "hf:"


@dataclass(frozen=True)
class HubDataset:
    """One split of a data set, in the library's order."""

    path: str
    config: str | None
    split: str

    @staticmethod
    def parse(source: str) -> HubDataset:
        """Read `hf:PATH[,CONFIG][:SPLIT]`.

        Raises:
            DataError: no path.
        """
        name, _, split = source.removeprefix(SCHEME).partition(":")
        path, _, config = name.partition(",")
        if not path:
            raise DataError(
                Fault(
                    KEY,
                    "names no data set",
                    got=repr(source),
                    need="hf:PATH[,CONFIG][:SPLIT]",
                    fix="for example hf:allenai/c4,en:train",
                )
            )
        return HubDataset(path=path, config=config or None, split=split or "train")

    def __str__(self) -> str:
        config = f",{self.config}" if self.config else ""
        return f"{SCHEME}{self.path}{config}:{self.split}"

    @property
    def num_bytes(self) -> int:
        """Size as the data set states it; 0 where it does not."""
        info = self._rows.info
        return int(info.dataset_size or info.download_size or 0)

    def rows(self) -> Iterator[Row]:
        """The rows, with their numbers from 0.

        Raises:
            DataError: the data set cannot be loaded.
        """
        for number, fields in enumerate(self._guarded(iter(self._rows))):
            yield Row(fields=fields, where=f"{self} row {number}", at=0)

    def documents(self, options: ReadOptions) -> Iterator[TextChunk]:
        """The text of every row; rows without text are left out.

        Raises:
            DataError: the data set cannot be loaded, or has no such column of text.
        """
        field = options.text_field
        for row in self._guarded(iter(self._rows)):
            if field not in row:
                need = f"one of {', '.join(row)}"
                fix = suggest_field(field, row)
                raise DataError(
                    Fault(
                        FIELD_KEY, f"{self} has no such column", got=repr(field), need=need, fix=fix
                    )
                )
            text = row[field]
            if not isinstance(text, str | None):
                kind = type(text).__name__
                raise DataError(
                    Fault(
                        FIELD_KEY,
                        f"{self}: the column {field!r} is not text",
                        got=kind,
                        need="strings",
                        fix="name a column of strings",
                    )
                )
            if text:
                yield from document_chunks(text, 0)

    @cached_property
    def _rows(self) -> Any:
        datasets = _import_datasets()
        try:
            return datasets.load_dataset(self.path, self.config, split=self.split, streaming=True)
        except Exception as error:  # noqa: BLE001 - whatever the library and its network raise concerns this data set
            raise self._unreadable(error) from None

    def _guarded(self, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        try:
            yield from rows
        except Exception as error:  # noqa: BLE001 - as above
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> DataError:
        why = first_line(error)[:MAX_ERROR_CHARS] or type(error).__name__
        fix = "check its name, configuration and split, and the network; or name files"
        return DataError(Fault(KEY, f"{self} cannot be read", got=why, fix=fix))


def _import_datasets() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]  # an extra, and a second to import
    except ImportError:
        fix = "pip install 'weft-train[hub]', or name files"
        raise DataError(
            Fault(KEY, "hf: needs the library datasets, which is not installed", fix=fix)
        ) from None
    datasets.disable_progress_bars()
    return datasets
