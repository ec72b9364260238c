"""Python code of users: loaded once by path or dotted name, one line for what is wrong, and a digest that follows imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config.user_code import is_reference, load_module, load_object, source_digest, trust_named
from weft.errors import ConfigError


def test_references_are_files_and_dotted_names() -> None:
    assert all(map(is_reference, ("my_model.py", "a/b/model.py", "pkg.gpt")))
    assert not any(map(is_reference, ("llama3", "qwen3_moe", "llama-3.1", "", None)))


def test_a_file_is_imported_once_by_any_of_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text("import beside\nvalue = beside.value\n")
    (tmp_path / "beside.py").write_text("value = object()\n")
    monkeypatch.chdir(tmp_path)
    trust_named("one.py")
    module = load_module("one.py", key="model.name")
    reference = str(tmp_path / "one.py")
    assert module is load_module(reference, key="model.name")
    assert load_object(f"{tmp_path}/one.py:value", key="optim.name") is module.value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1 / 0\n", "line 1: ZeroDivisionError: division by zero"),
        ("x = 1\ndef f(:\n", "line 2: SyntaxError"),
        ("import no_such_module_of_weft\n", "ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)\n", "raises on import"),
    ],
)
def test_a_file_that_raises_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    trust_named(path)
    with pytest.raises(ConfigError, match=line):
        load_module(str(path), key="model.name")


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        ("json:no_such", "json has no 'no_such'"),
        ("no_such_package.x:Y", "no such module"),
        ("json", "names no Python object"),
        ("no_such_file.py:Y", "no such file"),
    ],
)
def test_a_wrong_object_is_one_line(reference: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load_object(reference, key="optim.name")


def test_the_digest_follows_imports_within_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch_free\nfrom parts.layer import x\n")
    (tmp_path / "torch_free.py").write_text("")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    layer = tmp_path / "parts" / "layer.py"
    layer.write_text("from . import deep\nx = 1\n")
    deep = tmp_path / "parts" / "deep.py"
    deep.write_text("y = 1\n")
    (tmp_path / "other.py").write_text("z = 1\n")
    trust_named(tmp_path / "model.py")
    module = load_module(str(tmp_path / "model.py"), key="model.name")
    digests = [source_digest(module)]
    (tmp_path / "other.py").write_text("z = 2\n")
    assert source_digest(module) == digests[0]
    for changed in (layer, deep, tmp_path / "model.py"):
        changed.write_text(changed.read_text() + "# changed\n")
        digests.append(source_digest(module))
    assert len(set(digests)) == 4
