"""The identity of data files: other content in a file's place is found, whatever its size and times; a touched file passes."""

from __future__ import annotations

import os

import pytest

from weft.config.schema import DataConfig
from weft.data import identity
from weft.data.identity import DataIdentity
from weft.data.prepare import PrepareOptions, prepare
from weft.errors import DataError
from weft.models.llama3.config import Config


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("some text of words\n" * 99)
    return file


def identity_of(source, **keys):
    return DataIdentity.of(DataConfig(source=str(source), **keys), model=Config())


def replace_content(file):
    """Other bytes of the same size in another file that takes its place, with the same time."""
    times = os.stat(file)
    new = file.with_name("new")
    new.write_bytes(file.read_bytes().swapcase()[::-1])
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.rename(file)


def test_a_touched_or_copied_back_file_is_the_same(text):
    found = identity_of(text)
    os.utime(text)
    found.check()
    content = text.read_bytes()
    text.unlink()
    text.write_bytes(content)
    found.check()


def test_other_content_of_the_same_size_and_time_is_found(text):
    found = identity_of(text)
    replace_content(text)
    with pytest.raises(DataError, match=r"a\.txt has changed since the run started \(got another"):
        found.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.unlink(), "it is gone"),
        (lambda file: file.write_text("x"), "1 bytes, not 1,881"),
    ],
)
def test_a_missing_or_shorter_file_is_found(text, change, said):
    found = identity_of(text.parent)
    change(text)
    with pytest.raises(DataError, match=said):
        found.check()


def test_without_a_checksum_another_inode_is_a_change(text, monkeypatch):
    monkeypatch.setattr(identity, "MAX_CHECKSUM_BYTES", 9)
    found = identity_of(text)
    found.check()
    replace_content(text)
    with pytest.raises(DataError, match="another inode or time of change"):
        found.check()


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "meta.json"])
def test_every_file_of_a_prepared_folder_is_compared(tmp_path, text, name):
    prepare(PrepareOptions((str(text),), valid=0.0), tmp_path / "p")
    found = identity_of(tmp_path / "p")
    replace_content(tmp_path / "p" / name)
    with pytest.raises(DataError, match=f"p/{name} has changed"):
        found.check()


def test_files_are_only_read_again_where_they_have_changed(text, monkeypatch):
    found = identity_of(text)
    monkeypatch.setattr(identity, "block_checksums", None)
    found.check()


def test_evaluation_data_tokenizer_and_template_are_compared(tmp_path, text):
    files = [tmp_path / name for name in ("valid.txt", "t.jinja")]
    for file in files:
        file.write_text("some text")
    data = DataConfig(source=str(text), chat_template=str(files[1]))
    found = DataIdentity.of(data, model=Config(), evaluated_on=str(files[0]))
    for file in files:
        replace_content(file)
    with pytest.raises(DataError) as error:
        found.check()
    assert len(error.value.faults) == 2
