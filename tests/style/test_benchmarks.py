"""Every program of benchmarks/ finds what it imports, so that the commands of docs/LOG.md start."""

from __future__ import annotations

from pathlib import Path

from tests.programs import programs

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, sys

sys.path.insert(0, "")
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error}")
sys.exit("\\n".join(failed) or 0)
"""


def test_programs_find_what_they_import() -> None:
    paths = sorted((ROOT / "benchmarks").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert len(names) > 40
    modules = [name for name in names if not name.endswith("__main__")]
    done = programs().run(IMPORT_ALL, *modules, folder=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
