"""No code that runs data: eval, exec, unpickling, shells and unsafe YAML are forbidden, also where a lint is switched off."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
UNPICKLING = {
    "weft/parallel/model/fingerprint.py",
    "weft/start/run_process.py",
    "weft/models/common/backward_apart.py",
    "weft/run/fork_server.py",
    "weft/run/run_ranks.py",
}
"""Modules that pickle between this program's own processes."""
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "yaml", "code", "codeop"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("os", "system"),
    ("os", "popen"),
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
}
NAMES_OF_ATTRIBUTES = {name for _, name in FORBIDDEN_ATTRIBUTES}


def owner_and_name(node: ast.Attribute) -> tuple[str, str]:
    return ast.unparse(node.value), node.attr


def unsafe(tree: ast.AST, *, may_pickle: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module]
            else:
                modules = [n.name for n in node.names]
            for module in modules:
                if (module or "").partition(".")[0] in FORBIDDEN_MODULES and not may_pickle:
                    yield f"{node.lineno}: import of {module}"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                yield f"{node.lineno}: {node.func.id}"
            if any(
                key.arg in ("shell", "trust_remote_code", "allow_pickle") for key in node.keywords
            ):
                yield f"{node.lineno}: a keyword that allows code"
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in NAMES_OF_ATTRIBUTES  # without the cost of unparsing
            and owner_and_name(node) in FORBIDDEN_ATTRIBUTES
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_module_runs_data():
    found = []
    for path in SOURCES:
        name = str(path.relative_to(ROOT / "src"))
        tree = ast.parse(path.read_text())
        calls = unsafe(tree, may_pickle=name in UNPICKLING)
        found += [f"{name}:{call}" for call in calls]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import yaml",
        "eval('1')",
        "exec(text)",
        "import os\nos.system('x')",
        "torch.load(path)",
        "subprocess.run('x', shell=True)",
        "np.load(path)",
        "load(path, allow_pickle=True)",
    ],
)
def test_each_kind_is_found(text: str):
    assert list(unsafe(ast.parse(text), may_pickle=False))
