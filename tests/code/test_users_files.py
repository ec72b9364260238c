"""Which files are a user's: those beside the records of an installer are not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft.code.users_files import is_users_file, package_of_file


def test_packages_of_a_target_folder_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "some_package-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("some_package/__init__.py,,\none_module.py,,\n")
    record.with_name("METADATA").write_text(
        "Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert package_of_file(f"{tmp_path}/some_package/part/module.py") == "some_package"
    assert package_of_file(f"{tmp_path}/one_module.py") == "one_module"
    assert not is_users_file(f"{tmp_path}/some_package/module.py", frozenset())
    assert is_users_file(f"{tmp_path}/some_package/module.py", frozenset({"some_package"}))
    assert is_users_file(f"{tmp_path}/model.py", frozenset())  # a model beside what was installed


def test_files_of_a_project_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert package_of_file(f"{tmp_path}/package/module.py") == ""
    assert is_users_file(f"{tmp_path}/package/module.py", frozenset())
