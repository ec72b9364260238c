"""Hostile folders: planted links, pipes, bombs, forged headers and code do no harm; no secret of the environment is stored."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.input.cases import STEP, fifo, link
from tests.input.folders import edit_header, edit_json, forge_manifest, write, write_base
from tests.input.test_bad_inputs import listing
from tests.tiny_run import TINY
from weft.cli import main
from weft.errors import EXIT_OK, EXIT_USER

CANARY = "canary-5b1f"
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN")
EVIL = "import pathlib\npathlib.Path('PWNED').touch()\n"
IMPORT = ("import", "hf", "--out", "new", "--compare", "False")
TRAIN_TEXT = ("train", "--data.source", "d", "--out", "new", "--steps", "1", *TINY)
PREPARE = ("data", "prepare", "d", "--out", "new")


def planted_code(folder: Path) -> None:
    """Code, pickles and an auto_map beside good weights."""
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "setup.py",
        "conftest.py",
        "__init__.py",
    ):
        (folder / "hf" / name).write_text(EVIL)
    (folder / "hf/pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch PWNED'\ntR.")
    edit_json("hf/config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})(folder)


def data_folder(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "d").mkdir()
        (folder / "d" / "a.txt").write_text("harmless text " * 99)
        change(folder)

    return make


def bomb(folder: Path) -> None:
    with gzip.open(folder / "d/bomb.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(80):
            file.write(b" " * 2**20)


def linked_folder(folder: Path) -> None:
    """A folder of the data that is a link to one outside: it is not entered."""
    (folder / "d/more").symlink_to(folder.parent / "outside")


def hub_cache_with_a_way_out(folder: Path) -> None:
    """The layout of the hub's cache, with a link that leads beside the blobs."""
    snapshot = folder / "cache/snapshots/1"
    (folder / "cache/blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    shutil.move(folder / "hf", snapshot)
    (snapshot / "chat_template.jinja").symlink_to("../../../../outside/secret.txt")
    (folder / "hf").symlink_to(snapshot)


def zip_as_weights(folder: Path) -> None:
    """What torch.save writes: a zip file with a pickle."""
    with zipfile.ZipFile(folder / "hf/model.safetensors", "w") as file:
        file.writestr("archive/data.pkl", b"cos\nsystem\n(S'touch PWNED'\ntR.")


FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...], int]] = {
    "code and pickles beside weights": (planted_code, IMPORT, EXIT_OK),
    "a template that is a secret": (link("hf/chat_template.jinja", "../../outside/secret.txt"), IMPORT, EXIT_USER),
    "a config that is a secret": (link("hf/config.json", "../../outside/secret.txt"), IMPORT, EXIT_USER),
    "weights that are a secret": (link("hf/model.safetensors", "../../outside/secret.txt"), IMPORT, EXIT_USER),
    "a tokenizer that is a secret": (link("hf/tokenizer.json", "../../outside/secret.txt"), IMPORT, EXIT_USER),
    "a hub cache with a way out": (hub_cache_with_a_way_out, IMPORT, EXIT_USER),
    "a pickle named safetensors": (zip_as_weights, IMPORT, EXIT_USER),
    "a tensor named as a path": (edit_header(lambda h: h.update({"../PWNED": h.popitem()[1]})), IMPORT, EXIT_USER),
    "an index with paths": (
        write("hf/model.safetensors.index.json", json.dumps({"weight_map": {"a": "../../outside/secret.txt"}})),
        IMPORT,
        EXIT_USER,
    ),
    "a config that never ends": (fifo("hf/config.json"), IMPORT, EXIT_USER),
    "data with a link out": (data_folder(link("d/b.txt", "../../outside/secret.txt")), TRAIN_TEXT, EXIT_USER),
    "data with a linked folder": (data_folder(linked_folder), PREPARE, EXIT_OK),
    "data with a pipe": (data_folder(fifo("d/b.txt")), PREPARE, EXIT_USER),
    "data with a bomb": (data_folder(bomb), PREPARE, EXIT_USER),
    "data with code": (data_folder(write("d/evil.py", EVIL)), PREPARE, EXIT_OK),
    "tokens that are a secret": (
        link("prep/train.bin", "../../outside/secret.txt"),
        ("train", "--data.source", "prep", "--out", "new"),
        EXIT_USER,
    ),
    "a tokenizer of prepared data that is a secret": (
        lambda folder: (
            edit_json("prep/meta.json", tokenizer="tokenizer.json")(folder),
            link("prep/tokenizer.json", "../../outside/secret.txt")(folder),
        ),
        ("train", "--data.source", "prep", "--out", "new"),
        EXIT_USER,
    ),
    "a checkpoint with a linked file": (
        link(f"{STEP}/rank-00000.safetensors", "../../../../outside/secret.txt"),
        ("generate", "run", "--prompt", "x"),
        EXIT_USER,
    ),
    "a checkpoint that names a path": (
        forge_manifest(lambda m: m["files"].update({"../../../PWNED": m["files"].popitem()[1]})),
        ("train", "run/run.toml", "--resume", STEP, "--out", "new"),
        EXIT_USER,
    ),
    "a run with a linked template": (
        lambda folder: (
            (folder / "run/hf").mkdir(),
            (folder / "run/hf/chat_template.jinja").symlink_to("../../../outside/secret.txt"),
        ),
        ("export", "run", "new", "--compare", "False"),
        EXIT_USER,
    ),
    "events that are a device": (link("run/events.jsonl", "/dev/zero"), ("prove", "run"), EXIT_USER),
    "a config that names commands": (
        write("evil.toml", "[data]\nsource = \"$(touch PWNED)\"\n[model]\nname = \"; touch PWNED\"\n"),
        ("train", "evil.toml", "--out", "new"),
        EXIT_USER,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "valid"
    write_base(folder)
    return folder


@pytest.fixture
def place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a case, beside a folder with a secret."""
    for name in SECRETS:
        monkeypatch.setenv(name, CANARY)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text(CANARY)
    shutil.copytree(base, tmp_path / "case")
    monkeypatch.chdir(tmp_path / "case")
    return tmp_path / "case"


def holding_the_secret(folder: Path) -> list[str]:
    found = []
    for here, _, names in os.walk(folder):
        for name in names:
            path = Path(here, name)
            if path.is_file() and not path.is_symlink() and CANARY.encode() in path.read_bytes():
                found.append(str(path))
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_folder_does_no_harm(name: str, place: Path, capsys: pytest.CaptureFixture[str]):
    change, words, code = FOLDERS[name]
    change(place)
    before = listing(place.parent)
    assert main(words) == code
    captured = capsys.readouterr()
    after = listing(place.parent)
    own = re.compile(f"{re.escape(str(place))}/new(/|$)")
    assert [entry for entry in after if not own.match(entry[0])] == before
    assert CANARY not in captured.out + captured.err
    assert not holding_the_secret(place)
    assert not list(place.parent.rglob("PWNED"))
    if code == EXIT_USER:
        assert not (place / "new").exists()


def test_a_link_into_the_blobs_of_the_hub_cache_is_followed(place: Path):
    snapshot = place / "cache/snapshots/1"
    blobs = place / "cache/blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate((place / "hf").iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    words = ("import", str(snapshot), "--out", "new", "--compare", "False")
    assert main(words) == EXIT_OK


def test_no_secret_of_the_environment_is_stored(place: Path, capsys: pytest.CaptureFixture[str]):
    """A run, its checkpoint, its export and a failure of a rank."""
    words = ("train", "--out", "new", "--steps", "2", "--data.source", "text.txt", *TINY)
    assert main(words) == EXIT_OK
    assert main(("export", "new", "exported", "--compare", "False")) == EXIT_OK
    diverging = ("--optim.lr", "1e30", "--optim.clip", "0", "--optim.warmup", "0")
    assert main((*words, "--out", "failed", "--steps", "9", *diverging)) != EXIT_OK
    captured = capsys.readouterr()
    assert CANARY not in captured.out + captured.err
    assert not holding_the_secret(place)
