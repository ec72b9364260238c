"""Data behind URLs, by a web server of the test that breaks off, waits and rejects, and by file systems of fsspec; tars."""

from __future__ import annotations

import fcntl
import functools
import io
import json
import os
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from weft import file_systems
from weft.config.schema import DataConfig
from weft.data import streams
from weft.data.inputs import local_file
from weft.data.prepare import PrepareOptions, prepare
from weft.data.prepared import tokenizer_of
from weft.data.row_files import tar_rows
from weft.data.streams import CACHE_VARIABLE, GIB, RemoteFile, make_room, remote_files, source_files
from weft.data.token_sources import open_source
from weft.errors import DataError

TEXT = b"".join(b"line %d of a text that is served in parts\n" % number for number in range(4000))


class Server(BaseHTTPRequestHandler):
    """Serves TEXT; breaks off after a third of what is asked for, as often as `num_breaks`."""

    num_breaks: ClassVar[int] = 0
    waits_s: ClassVar[float] = 0.0
    continues: ClassVar[bool] = True
    version: ClassVar[str] = '"1"'
    content: ClassVar[bytes] = TEXT
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        own = type(self)
        asked = self.headers.get("Range", "")
        own.requests.append(f"{self.path} {asked}".strip())
        if "missing" in self.path:
            self.send_error(404)
            return
        if "busy" in self.path:
            self.send_error(503)
            return
        is_same = self.headers.get("If-Range", own.version) == own.version
        start = int(asked[6:-1]) if asked and own.continues and is_same else 0
        body = own.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", own.version)
        self.end_headers()
        if own.num_breaks:
            own.num_breaks -= 1
            self.wfile.write(body[: len(body) // 3])
            return
        for place in range(0, len(body), 2**14):
            time.sleep(own.waits_s)
            self.wfile.write(body[place : place + 2**14])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_store_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_FAILURES", {})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, type[Server]]]:
    """The URL of a server, and the class whose attributes say how it answers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(streams, "PAUSE_S", 0.001)
    own = type("OwnServer", (Server,), {"requests": []})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), own)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", own
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def complaint(source: str) -> str:
    with pytest.raises(DataError) as raised:
        source_files(source)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_a_download_continues_where_it_broke_off(server: tuple[str, type[Server]]) -> None:
    url, own = server
    own.num_breaks = 3
    (file,) = source_files(f"{url}/text.txt")
    assert file.read_bytes() == TEXT
    third = len(TEXT) // 3
    assert own.requests[:2] == ["/text.txt", f"/text.txt bytes={third}-"]
    assert len(own.requests) == 4
    assert source_files(f"{url}/text.txt") == (file,)
    assert len(own.requests) == 4  # the second time the cache has it
    stream = open_source(f"{url}/text.txt", DataConfig(), vocab=256)
    assert bytes(stream.read(0, 30).tolist()) == TEXT[:30]


def test_a_server_without_ranges_or_with_another_content_starts_again(
    server: tuple[str, type[Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, own = server
    own.num_breaks, own.continues = 1, False
    assert source_files(f"{url}/whole.txt")[0].read_bytes() == TEXT
    own.num_breaks, own.continues = 1, True
    other = TEXT.upper()

    def changed(self: Server) -> None:
        Server.do_GET(self)
        own.content, own.version = other, '"2"'

    monkeypatch.setattr(own, "do_GET", changed)
    assert source_files(f"{url}/changed.txt")[0].read_bytes() == other


def test_a_slow_server_is_waited_for(server: tuple[str, type[Server]]) -> None:
    url, own = server
    own.waits_s = 0.01
    assert source_files(f"{url}/slow.txt")[0].read_bytes() == TEXT


def test_what_cannot_be_downloaded_is_one_line(server: tuple[str, type[Server]]) -> None:
    url, own = server
    assert "missing.txt cannot be downloaded (got HTTPError: HTTP Error 404" in complaint(
        f"{url}/missing.txt"
    )
    assert len(own.requests) == 1
    assert "5 times in a row" in complaint(f"{url}/busy.txt")
    assert len(own.requests) == 6
    assert "cannot be read" in complaint("nothing://bucket/file.txt")
    assert "no file matches" in complaint("memory://nowhere/*.txt")
    assert "FileNotFoundError" in complaint("memory://nowhere/file.txt")


def test_numbers_in_braces_name_files(server: tuple[str, type[Server]]) -> None:
    url, _ = server
    names = [file.url for file in remote_files(f"{url}/part-{{08..10}}.txt")]
    assert names == [f"{url}/part-{number}.txt" for number in ("08", "09", "10")]


def test_the_cache_is_bounded(
    server: tuple[str, type[Server]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is prepared is read file by file; what is trained on must fit."""
    url, _ = server
    monkeypatch.setenv(CACHE_VARIABLE, str(2.5 * len(TEXT) / GIB))
    out = tmp_path / "prepared"
    meta = prepare(PrepareOptions((f"{url}/part-{{1..4}}.txt",), valid=0.0), out)
    assert (out / "train.bin").stat().st_size == 2 * 4 * len(TEXT)
    assert meta.read_as == "4 files"
    kept = list((tmp_path / "cache" / "weft" / "data").glob("*/*.txt"))
    assert len(kept) == 2
    assert RemoteFile(f"{url}/part-4.txt").path in kept
    assert "is larger than the cache" in complaint(f"{url}/part-{{1..4}}.txt")
    for size in ("much", "nan", "-1", "0"):
        monkeypatch.setenv(CACHE_VARIABLE, size)
        assert "is no size" in complaint(f"{url}/part-1.txt")


def cached(number: int) -> RemoteFile:
    """A file in the cache, in a folder of its own."""
    file = RemoteFile(f"http://nowhere/{number}.txt")
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(TEXT)
    return file


def test_processes_may_make_room_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks of one host do: each finds folders that another one is removing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_VARIABLE, str(len(TEXT) / GIB))
    files = [cached(number) for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(make_room) for _ in range(4)]:
            done.result()
    assert sum(file.path.exists() for file in files) <= 1


def test_a_folder_that_is_downloaded_into_is_not_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_VARIABLE, str(len(TEXT) / GIB))
    files = [cached(number) for number in range(3)]
    for age, file in enumerate(files):
        os.utime(file.path, (9 - age, 9 - age))
    with (files[2].path.parent / streams.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_room()
    assert [file.path.exists() for file in files] == [True, False, True]


def test_a_file_stays_in_the_cache_as_long_as_it_is_read(
    monkeypatch: pytest.MonkeyPatch, server: tuple[str, type[Server]]
) -> None:
    """While another process makes room for its own; here the bound is below a single file."""
    url, _ = server
    monkeypatch.setenv(CACHE_VARIABLE, str(1 / GIB))
    first, second = RemoteFile(f"{url}/a.txt"), RemoteFile(f"{url}/b.txt")
    with local_file(first) as path:
        with local_file(second) as other:
            assert path.read_bytes() == other.read_bytes() == TEXT
        make_room()
        assert (first.path.exists(), second.path.exists()) == (True, False)
    make_room()
    assert not first.path.parent.exists()


def test_a_folder_that_is_removed_while_its_lock_is_awaited_is_made_again(
    server: tuple[str, type[Server]],
) -> None:
    url, _ = server
    file = RemoteFile(f"{url}/a.txt")
    file.path.parent.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        with (file.path.parent / streams.LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fetched = pool.submit(file.fetched)
            time.sleep(0.2)
            shutil.rmtree(file.path.parent)
        assert fetched.result().read_bytes() == TEXT


def test_file_systems_of_fsspec_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fsspec  # type: ignore[import-untyped]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    rows = [json.dumps({"text": f"row {number}"}) for number in range(3)]
    for number, row in enumerate(rows):
        memory.pipe_file(f"/texts/{number}.jsonl", row.encode())
    for source in ("memory://texts/*.jsonl", "memory://texts"):
        assert [file.read_text() for file in source_files(source)] == rows
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a text")
    assert source_files(f"file://{folder}/a.txt")[0].read_text() == "a text"
    memory.rm("/texts", recursive=True)


def test_another_content_behind_a_url_of_a_file_system_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the file system tells; what one start has downloaded of a version, the next continues."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "texts" / "a.txt"
    file.parent.mkdir()
    for name in ("_SUCCESS", "a.png", ".a.txt.crc"):
        (file.parent / name).write_bytes(b"\xff")
    for source in (f"file://{file}", f"file://{file.parent}/*.txt", f"file://{file.parent}"):
        for second, text in enumerate((b"a text", b"another", b"a third")):
            file.write_bytes(text)
            os.utime(file, (second, second))
            (found,) = source_files(source)
            assert found.read_bytes() == text
            assert source_files(source) == (found,)
    os.utime(file, (9, 9))
    (remote,) = remote_files(f"file://{file}")
    part = remote.path.with_name(f".{file.name}.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"A TH")
    assert remote.fetched().read_bytes() == b"A THird"


def test_a_file_system_that_is_gone_is_not_needed_for_what_it_named_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So ranks start again, and runs resume, without their object store; a warning says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_bytes(TEXT)
    prepare(PrepareOptions((str(texts),), valid=0.0), tmp_path / "prepared")
    sources = (f"file://{texts}/*.txt", f"file://{texts}", f"file://{tmp_path}/prepared")
    files = [open_source(source, DataConfig(), vocab=256).files for source in sources]

    def gone(_url: str) -> tuple[object, str]:
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(streams, "_file_system", gone)
    with pytest.warns(UserWarning, match=r"the store is gone\): its files in the cache are read"):
        again = [open_source(source, DataConfig(), vocab=256).files for source in sources]
    assert again == files
    assert "ConnectionError: the store is gone" in complaint(f"file://{texts}/*.md")
    files[0][0].unlink()
    assert "ConnectionError: the store is gone" in complaint(sources[0])


class Folder(SimpleHTTPRequestHandler):
    """Serves a folder, and a page that lists it."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_file_system_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store that was down held each of several questions of a command as long as the first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = cached(1)
    calls: list[str] = []

    def ask(answer: str, url: str = "s3://bucket/texts") -> tuple[RemoteFile, ...]:
        def asked() -> Iterator[RemoteFile]:
            calls.append(answer)
            if answer == "nothing":
                raise TimeoutError(answer)
            yield file

        return streams._asked(url, asked)

    ask("files", "s3://bucket/others")
    calls.clear()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            ask("nothing")  # there is no earlier answer
    now = time.monotonic()
    monkeypatch.setattr(streams.time, "monotonic", lambda: now + streams.SAME_COMMAND_S)
    assert ask("files") == (file,)
    with pytest.warns(UserWarning, match="its files in the cache are read"):
        assert ask("nothing") == (file,)
    with pytest.warns(UserWarning, match="its files in the cache are read"):
        assert ask("nothing") == ask("files") == (file,)
    with pytest.warns(UserWarning, match="s3://bucket/others cannot be reached"):
        assert ask("nothing", "s3://bucket/others") == (file,)
    assert calls == ["nothing", "files", "nothing"]
    monkeypatch.setattr(streams.time, "monotonic", lambda: now + 2 * streams.SILENCE_S)
    ask("files")
    assert calls[3:] == ["files"]


def test_requests_to_s3_are_limited_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that accepted connections and answered nothing held a run for four minutes."""
    core = SimpleNamespace(url_to_fs=lambda url, **options: (SimpleNamespace(**options), url))
    config = SimpleNamespace(conf={"s3": {"config_kwargs": {"read_timeout": 5}}})
    modules = {"fsspec.core": core, "fsspec.config": config}
    monkeypatch.setattr(file_systems.importlib, "import_module", modules.__getitem__)
    fs, path = file_systems.open_file_system("s3://bucket/a", skip_instance_cache=True)
    assert (path, fs.retries, fs.skip_instance_cache) == ("s3://bucket/a", 2, True)
    assert fs.config_kwargs == {**file_systems.S3_LIMITS, "read_timeout": 5}
    fs, _ = file_systems.open_file_system("gs://bucket/a")
    assert vars(fs) == {}


@pytest.fixture
def folder_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a server of tmp_path/served."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(streams, "PAUSE_S", 0.001)
    (tmp_path / "served").mkdir()
    handler = functools.partial(Folder, directory=str(tmp_path / "served"))
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_prepared_folders_behind_urls_are_read(folder_url: str, tmp_path: Path) -> None:
    """With documents, splits and tokenizer, by a web server and by a file system."""
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(TEXT[number * 900 : number * 900 + 800])
    served = tmp_path / "served" / "prepared"
    options = PrepareOptions((str(tmp_path / "texts"),), tokenizer="train", vocab=260, valid=0.5)
    prepare(options, served)
    read = functools.partial(open_source, data=DataConfig(), vocab=260)
    for url in (f"{folder_url}/prepared", f"file://{served}"):
        for name, split in (("", "train"), ("/", "valid"), ("/valid.bin", "train")):
            found = read(f"{url}{name}", split=split)
            right = read(f"{served}{name}", split=split)
            assert found.read(0, len(found)).tolist() == right.read(0, len(right)).tolist()
            assert found.document_bounds[:].tolist() == right.document_bounds[:].tolist()
        assert tokenizer_of(DataConfig(source=url)).vocab == 260
    with pytest.raises(DataError, match="holds tokens already"):
        prepare(replace(options, inputs=(f"file://{served}",)), tmp_path / "again")
    served.rename(served.with_name("moved")).joinpath("train.idx").unlink()
    with pytest.raises(DataError, match=r"moved/train.idx cannot be downloaded.*404"):
        read(f"{folder_url}/moved")


def test_a_page_is_not_read_as_a_text(folder_url: str, tmp_path: Path) -> None:
    """Such as the list of a folder, or the view of a file; a page of its own name is read."""
    assert "is a page, not a file (got text/html)" in complaint(f"{folder_url}/")
    (tmp_path / "served" / "a.html").write_bytes(b"<p>a text</p>")
    assert source_files(f"{folder_url}/a.html")[0].read_bytes() == b"<p>a text</p>"


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_samples_of_a_tar_are_rows(tmp_path: Path, suffix: str) -> None:
    members = {
        "part/0001.txt": b"first",
        "part/0001.json": b'{"url": "a"}',
        "part/0001.jpg": b"\xff\xd8\xff",
        "part/0002.TXT": "second é".encode(),
        "part/0003.jpg": b"\xff\xd8\xff",
        "part/0004.json": b'{"messages": []}',
        "part/0005.title.txt": b"fifth",
        "part/0005.score.json": b"5",
    }
    mode = "w:gz" if suffix else "w"
    file = write_tar(tmp_path / f"shard.tar{suffix}", members, mode)
    assert [dict(row.fields) for row in tar_rows(file)] == [
        {"text": "first", "url": "a"},
        {"text": "second é"},
        {"messages": []},
        {"title": "fifth", "score": 5},
    ]
    texts = write_tar(tmp_path / f"texts.tar{suffix}", dict(list(members.items())[:4]), mode)
    stream = open_source(str(texts), DataConfig(), vocab=256)
    assert bytes(stream.read(0, len(stream)).tolist()) == "firstsecond é".encode()
    assert stream.document_bounds[:].tolist() == [0, 5, 14]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.txt": b"\xff"}, "1.txt is no UTF-8 text"),
        ({"1.json": b"[1]"}, "is not a JSON object"),
        ({"1.a.json": b"{"}, "1.a.json is no JSON"),
    ],
)
def test_what_is_wrong_in_a_tar_is_named(
    tmp_path: Path, members: dict[str, bytes], message: str
) -> None:
    file = write_tar(tmp_path / "shard.tar", members)
    with pytest.raises(DataError, match=message):
        list(tar_rows(file))
    cut = tmp_path / "cut.tar"
    cut.write_bytes(write_tar(tmp_path / "long.tar", {"1.txt": bytes(2000)}).read_bytes()[:1000])
    with pytest.raises(DataError, match="broken tar"):
        list(tar_rows(cut))


@pytest.mark.parametrize("damage", ["a header is overwritten", "a header is cut"])
def test_a_tar_does_not_end_at_a_broken_header(tmp_path: Path, damage: str) -> None:
    """Where `tarfile` sees its end, if members came before."""
    file = write_tar(tmp_path / "shard.tar", {f"{number}.txt": b"text" for number in range(4)})
    content = file.read_bytes()
    header = 2 * 2 * tarfile.BLOCKSIZE
    rest = content[header + tarfile.BLOCKSIZE :]
    broken = b"?" * tarfile.BLOCKSIZE + rest if "overwritten" in damage else b"2.txt"
    file.write_bytes(content[:header] + broken)
    with pytest.raises(DataError, match="broken tar"):
        list(tar_rows(file))
