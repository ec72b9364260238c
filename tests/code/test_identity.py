"""The identity of code: every change of what a model computes shows, by name; two processes have the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
import torch

from weft.code.identity import CodeIdentity, changed_parts, identity_of

CELL = """
import enum, functools, helper, threading
from dataclasses import dataclass, field
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SCALE = 2.0
SIZES = {"up": (4, [8, 16])}
KINDS = {"gelu", "relu", "silu"}
TABLE = np.arange(4.0)
BUFFER = torch.ones(4)
PART = functools.partial(max, 3)
LOCK = threading.Lock()
LAYERS = {}

def register(name):
    def add(cls):
        LAYERS[name] = cls
        return cls
    return add

def power(n):
    def raised(x):
        return x ** n
    return raised

SQUARE, CUBE = power(2), power(3)

class Mode(enum.Enum):
    WARM = 1
    COLD = 2

class Base(nn.Module):
    def mix(self, x):
        return x + 1

    @property
    def shift(self):
        return 5

    @staticmethod
    def sign(x):
        return -x

    @classmethod
    def zero(cls):
        return 0

@register("layer")
class Layer(Base):
    factor = 0.5

    def __init__(self, c, bias=0.25):
        super().__init__()
        self.up = nn.Linear(c.dim, c.dim)

    def forward(self, x, *, extra=1):
        x = F.gelu(self.up(x)) * SCALE * SIZES["up"][0] + helper.offset(x) + SQUARE(x)
        if Mode.WARM.value and "gelu" in KINDS:
            x = x + PART(2) * TABLE[0] * BUFFER[0] + (lambda y: y * 7)(x)
        return self.mix(x) + cached(2) + tuned(x)

@functools.lru_cache
def cached(n):
    return n + 11

@torch.no_grad()
def tuned(x):
    return x * 13

@dataclass(frozen=True)
class Config:
    dim: int = 8
    rates: list = field(default_factory=lambda: [17, 18])

def blocks(c):
    with LOCK:
        return {"layer0": LAYERS["layer"](c)}
"""
HELPER = "OFFSET = 3\ndef offset(x): return x - OFFSET\ndef unused(x): return 1\n"
CHANGES = {
    "layer class": ("x = F.gelu(", "x = F.relu(", "class Layer (notebook)"),
    "base class": ("return x + 1", "return x + 2", "class Base (notebook)"),
    "property": ("return 5", "return 6", "class Base (notebook)"),
    "static method": ("return -x", "return x", "class Base (notebook)"),
    "class method": ("return 0\n", "return 1\n", "class Base (notebook)"),
    "class attribute": ("factor = 0.5", "factor = 0.75", "class Layer (notebook)"),
    "default": ("bias=0.25", "bias=0.5", "class Layer (notebook)"),
    "keyword default": ("extra=1", "extra=2", "class Layer (notebook)"),
    "inner lambda": ("y * 7", "y * 8", "class Layer (notebook)"),
    "global number": ("SCALE = 2.0", "SCALE = 2.5", "variable SCALE (notebook)"),
    "number's type": ("SCALE = 2.0", "SCALE = 2", "variable SCALE (notebook)"),
    "global dict": ("[8, 16]", "[8, 17]", "variable SIZES (notebook)"),
    "global set": ('"silu"', '"tanh"', "variable KINDS (notebook)"),
    "array": ("arange(4.0)", "arange(4.0) + 1", "variable TABLE (notebook)"),
    "tensor": ("ones(4)", "zeros(4)", "variable BUFFER (notebook)"),
    "partial": ("(max, 3)", "(max, 4)", "variable PART (notebook)"),
    "closure": ("power(2), power(3)", "power(4), power(3)", "function power (notebook)"),
    "member of an enum": ("WARM = 1", "WARM = 3", "class Mode (notebook)"),
    "cached function": ("n + 11", "n + 12", "function cached (notebook)"),
    "decorated function": ("x * 13", "x * 14", "function tuned (notebook)"),
    "registry": ('LAYERS["layer"]', 'LAYERS.get("layer")', "function blocks (notebook)"),
    "field factory": ("[17, 18]", "[17, 19]", "class Config (notebook)"),
    "helper's function": ("x - OFFSET", "x + OFFSET", "function offset (helper)"),
    "helper's variable": ("OFFSET = 3", "OFFSET = 4", "variable OFFSET (helper)"),
}


class Notebook:
    """A module without a file, and a helper in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(folder))

    def identity(self, cell: str = CELL, helper: str = HELPER) -> CodeIdentity:
        """Of the values after the cell was executed."""
        path = self.folder / "helper.py"
        path.write_text(helper)
        modules = {}
        for name, text, file in (("helper", helper, str(path)), ("notebook", cell, None)):
            modules[name] = module = ModuleType(name)
            module.__file__ = file
            self.monkeypatch.setitem(sys.modules, name, module)
            exec(compile(text, file or "<cell>", "exec"), vars(module))
        found = vars(modules["notebook"])
        return identity_of({name: found[name] for name in ("Config", "blocks")}, module="notebook")


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    return Notebook(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Notebook(tmp_path_factory.mktemp("before"), monkeypatch).identity()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows_by_name(notebook, before, change):
    old, new, part = CHANGES[change]
    assert (CELL + HELPER).count(old) == 1
    after = notebook.identity(CELL.replace(old, new), HELPER.replace(old, new))
    assert after.digest != before.digest
    assert part in changed_parts(before.parts, after, folder=None)


def test_equal_code_is_equal(notebook, before):
    assert before.digest
    assert notebook.identity().parts == before.parts
    moved = notebook.identity(f"# a comment\n\n{CELL}\nUNUSED = 3\n")
    assert moved.parts == before.parts


def test_code_that_was_sent_to_another_process_is_equal(notebook):
    """As weft.train sends a model to the process of its run."""
    before = notebook.identity(CELL.replace("with LOCK:", "if True:"))
    module = sys.modules["notebook"]
    cloudpickle.register_pickle_by_value(module)
    sent = cloudpickle.loads(cloudpickle.dumps({"Config": module.Config, "blocks": module.blocks}))
    cloudpickle.unregister_pickle_by_value(module)
    assert sent["blocks"] is not module.blocks
    assert identity_of(sent, module="notebook").parts == before.parts


def test_swapped_closures_differ(notebook, before):
    swapped = notebook.identity(CELL.replace("power(2), power(3)", "power(3), power(2)"))
    assert swapped.digest != before.digest


def test_a_function_that_replaces_one_of_torch_shows(notebook, before, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: x)
    replaced = notebook.identity()
    assert "function torch.nn.functional.gelu (replaced)" in replaced.parts
    monkeypatch.setattr(torch.nn.functional, "gelu", torch.nn.functional.relu)
    assert notebook.identity().digest not in (before.digest, replaced.digest)


@pytest.mark.parametrize("owner", [torch.nn.Linear, torch.nn.Module, torch.Tensor])
def test_a_method_that_replaces_one_of_torch_shows(notebook, before, monkeypatch, owner):
    monkeypatch.setattr(owner, "extra_repr", lambda self: "", raising=False)
    assert notebook.identity().digest != before.digest


def test_a_method_that_replaces_one_in_a_module_of_a_library_shows(notebook, before, monkeypatch):
    monkeypatch.setattr(torch.nn.Bilinear, "forward", lambda self, x: x)  # beside nn.Linear
    part = "function torch.nn.modules.linear.Bilinear.forward (replaced)"
    assert part in notebook.identity().parts


UNHASHED = {
    "socket": ("import socket\nTHING = socket.socket()", "variable THING (notebook)"),
    "open file": ("THING = open(__import__('os').devnull)", "variable THING (notebook)"),
    "eval": ("def THING(x): return eval(x)", "function THING (notebook)"),
}


@pytest.mark.parametrize("thing", UNHASHED)
def test_what_has_no_stable_value_is_named(notebook, thing):
    text, part = UNHASHED[thing]
    identity = notebook.identity(f"{CELL}\n{text}\ndef blocks(c): return THING\n")
    assert identity.digest is None
    assert identity.unknown[0].startswith(part)
    thing_itself = sys.modules["notebook"].THING
    getattr(thing_itself, "close", bool)()


STRANGE = """
import collections, functools, gc, itertools, logging, random, re, typing, weakref
LOG, RNG, COUNT = logging.getLogger("x"), np.random.default_rng(3), itertools.count(3)
PYTHON_RNG, EVENT, LOCAL = random.Random(3), threading.Event(), threading.local()
GENERATOR, CHAIN = torch.Generator().manual_seed(1), nn.Sequential(nn.Linear(2, 2), nn.GELU())
PATTERN, Point = re.compile("a+"), collections.namedtuple("Point", "x y")
class Node:
    __slots__ = ("next", "__weakref__")
NODE = Node()
NODE.next = [NODE, weakref.ref(NODE)]
class Hostile:
    def __getattr__(self, name): raise KeyError(name)
    def __eq__(self, other): raise RuntimeError
    def __bool__(self): raise RuntimeError
    __repr__ = __hash__ = __len__ = __bool__
class Hashed(str):
    def __repr__(self): raise RuntimeError
HOSTILE, TEXT = Hostile(), Hashed("a")
IN_SET = Node()
IN_SET.next = frozenset([IN_SET])
SPACE = {}
exec("made = lambda x: x + 5", SPACE)
class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x
@functools.singledispatch
def dispatch(x): return x
@dispatch.register
def _(x: int): return -x
def __getattr__(name): return 5
TYPES = (typing.Optional[int], int | str, list[int], torch.float32, torch.device("cpu"), Point(1, 2))
DEQUE, DEFAULTS = collections.deque([1]), collections.defaultdict(list, a=[1])
def blocks(c):
    return (LOG, RNG, COUNT, PYTHON_RNG, EVENT, LOCAL, GENERATOR, CHAIN, PATTERN, NODE, HOSTILE, TEXT,
            IN_SET, SPACE, Fn, dispatch, TYPES, DEQUE, DEFAULTS, Layer.forward, gc.collect)
"""


def test_strange_objects_have_an_identity(notebook):
    first = notebook.identity(CELL + STRANGE)
    assert first.unknown == ()
    assert notebook.identity(CELL + STRANGE).parts == first.parts
    for old, new in (
        ("y * 7", "y * 9"),
        ("x: int): return -x", "x: int): return +x"),
        ("x + 5", "x + 6"),
    ):
        changed = (CELL + STRANGE).replace(old, new)
        assert changed != CELL + STRANGE
        assert notebook.identity(changed).digest != first.digest


ASKING = {
    "attribute": "def blocks(c): return 3 if torch.compiler.is_compiling() else 1",
    "other name": "from torch.compiler import is_compiling as ask\ndef blocks(c): return ask()",
    "imported when it runs": (
        "def blocks(c):\n from torch.compiler import is_dynamo_compiling as ask\n return ask()"
    ),
    "closure": "def blocks(c): return [lambda: torch.compiler.is_compiling() for _ in range(2)]",
}


@pytest.mark.parametrize("text", ASKING.values(), ids=ASKING)
def test_code_that_asks_whether_it_is_compiled_is_named(notebook, text):
    assert notebook.identity(f"{CELL}\n{text}\n").asks_compiler == ("blocks (notebook)",)
    assert notebook.identity().asks_compiler == ()


def test_a_long_chain_of_objects_ends(notebook):
    chain = "CHAIN = []\nfor _ in range(20_000): CHAIN = [CHAIN]\ndef blocks(c): return CHAIN\n"
    assert notebook.identity(CELL + chain).digest


COMPILED = """
@torch.compile
def compiled(x): return x + 19
def blocks(c): return compiled
"""
PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
import notebook_file as found
from weft.code.identity import identity_of
identity = identity_of({"Config": found.Config, "blocks": found.blocks}, module="notebook_file")
print(identity.digest, *identity.unknown)
"""


@pytest.mark.slow
def test_two_processes_have_the_same(tmp_path):
    (tmp_path / "notebook_file.py").write_text(CELL + STRANGE + COMPILED)
    (tmp_path / "helper.py").write_text(HELPER)
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROCESS, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, folder in (("1", "/"), ("2", str(tmp_path)))
    }
    (digest,) = digests
    assert len(digest.split()) == 1


def test_cost(notebook):
    start = time.process_time()
    notebook.identity()
    assert time.process_time() - start < 0.5  # 20 ms on an idle core
