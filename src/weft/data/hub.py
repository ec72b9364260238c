"""Owns documents of a data set that the library `datasets` knows: of its hub by name, or in a folder of this machine.

    hf:allenai/c4,en            the split "train" of the configuration "en"
    hf:corpora/letters:test     the split "test" of a folder with data files

Rows come one after the other as the library streams them; nothing is downloaded before it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.data.documents import FIELD_KEY, Piece, Reading, document, other_field
from weft.data.files import KEY
from weft.errors import DataError, Fault

SCHEME = "hf:"
TOLD_CHARS = 160


@dataclass(frozen=True)
class HubSet:
    """One split of a data set, in the library's order."""

    path: str
    config: str | None
    split: str

    @staticmethod
    def parse(source: str) -> HubSet:
        """What `hf:PATH[,CONFIG][:SPLIT]` names.

        Raises:
            DataError: no path.
        """
        rest, _, split = source.removeprefix(SCHEME).partition(":")
        path, _, config = rest.partition(",")
        if not path:
            raise DataError(Fault(KEY, "names no data set", repr(source), "hf:PATH[,CONFIG][:SPLIT]"))
        return HubSet(path, config or None, split or "train")

    def __str__(self) -> str:
        return f"{SCHEME}{self.path}" + (f",{self.config}" if self.config else "") + f":{self.split}"

    @property
    def num_bytes(self) -> int:
        """As far as the set says: 0 where it does not."""
        return int(self._rows.info.dataset_size or self._rows.info.download_size or 0)

    def documents(self, reading: Reading) -> Iterator[Piece]:
        """The text of every row; rows without text are left out.

        Raises:
            DataError: the set cannot be had, or has no such column of text.
        """
        field, rows = reading.text_field, iter(self._rows)
        for row in self._guarded(rows):
            if field not in row:
                need = f"one of {', '.join(row)}"
                raise DataError(
                    Fault(FIELD_KEY, f"{self} has no such column", repr(field), need, other_field(field, row))
                )
            if not isinstance(row[field], str | None):
                kind = type(row[field]).__name__
                raise DataError(Fault(FIELD_KEY, f"{self}: the column {field!r} is no text", kind, "strings"))
            if row[field]:
                yield from document(row[field], 0)

    @cached_property
    def _rows(self) -> Any:
        datasets = _library()
        try:
            return datasets.load_dataset(self.path, self.config, split=self.split, streaming=True)
        except Exception as error:  # noqa: BLE001 - whatever the library and its network raise, it is about this set alone
            raise self._unreachable(error) from None

    def _guarded(self, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        try:
            yield from rows
        except Exception as error:  # noqa: BLE001 - as above
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> DataError:
        why = str(error).partition("\n")[0][:TOLD_CHARS] or type(error).__name__
        fix = "check its name, configuration and split, and the network; or name files"
        return DataError(Fault(KEY, f"{self} cannot be read", why, fix=fix))


def _library() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]  # an extra, and a second to import
    except ImportError:
        fix = "pip install 'weft-train[hub]', or name files"
        raise DataError(Fault(KEY, "hf: needs the library datasets, which is not installed", fix=fix)) from None
    datasets.disable_progress_bars()
    return datasets
