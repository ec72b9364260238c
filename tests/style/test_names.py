"""Names: a class is defined in one module, and a file name stands in at most two folders."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import weft

ROOT = Path(weft.__file__).parents[1]
FILES_OF_EVERY_FOLDER = {"__init__.py"}
FILES_OF_A_FAMILY = {"config.py", "model.py", "hf.py"}
CLASS_OF_A_FAMILY = "Config"
CLASS = re.compile(r"^ *class _*(\w+)[(:]", re.MULTILINE)


def test_no_class_name_is_defined_in_two_modules() -> None:
    modules: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for name in CLASS.findall(path.read_text(encoding="utf-8")):
            modules[name].add(path.relative_to(ROOT).as_posix())
    modules.pop(CLASS_OF_A_FAMILY)
    repeated = {name: sorted(found) for name, found in modules.items() if len(found) > 1}
    assert not repeated


def test_no_file_name_is_in_three_folders() -> None:
    folders: dict[str, list[str]] = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        is_in_family = path.parent.parent == ROOT / "weft" / "models"
        if path.name in FILES_OF_EVERY_FOLDER or (is_in_family and path.name in FILES_OF_A_FAMILY):
            continue
        folders[path.name].append(path.parent.relative_to(ROOT).as_posix())
    repeated = {name: sorted(found) for name, found in folders.items() if len(found) > 2}
    assert not repeated
