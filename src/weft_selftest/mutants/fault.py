"""Records of faults: which collective, function or module computes something else, and what a proof must report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from weft.comm.transport import Op
from weft.prove.small_sizes import small_words

CollectiveChange = Literal[
    "skip",
    "scale",
    "avg",
    "max",
    "bfloat16",
    "reverse",
    "repeat",
    "twice",
    "group",
    "stale",
    "truncate",
    "zero",
]
"""What becomes of a collective:

skip      it does not run: every member keeps what it has
scale     its result is multiplied by `factor`
avg, max  another reduction
bfloat16  what it sends is rounded to bfloat16
reverse   the pieces of the members are in reverse order
repeat    every piece is that of the first member
twice     it runs again on its own result
group     it runs over the ranks of `other_axis`
stale     its result is that of the call before it
truncate  the last quarter of its result is not written
zero      the member at `place` sends zeros
"""

FunctionChange = Callable[..., Any]
"""Called with the function that it replaces, and with that function's arguments."""


@dataclass(frozen=True)
class CollectiveFault:
    """Some of the collectives that ranks start do something else.

    Attributes:
        site: qualified name of a function in whose call the collective starts.
        op: the operation; "": any.
        axis: mesh axis, as calls name it ("dp+cp"); "": any.
        place: member of the group for which the change holds; None: all.
        call: number of the collective among those of the site on a rank, from 0; None: all.
    """

    site: str
    change: CollectiveChange
    op: Op | Literal[""] = ""
    axis: str = ""
    place: int | None = None
    call: int | None = None
    factor: float = 1.0
    other_axis: str = ""


@dataclass(frozen=True)
class FunctionFault:
    """A function or method computes something else.

    Attributes:
        target: "module:name" or "module:Class.name", where the name is looked up when it is called.
        change: what is called instead, with the function itself as its first argument.
    """

    target: str
    change: FunctionChange


@dataclass(frozen=True)
class ModuleFault:
    """The forward of one module of the parallel model computes something else.

    Attributes:
        path: global path of the module ("layer1.attn.o").
        change: as in `FunctionFault`; its second argument is the module.
        axis: mesh axis without which there is no fault; "": every layout has it.
        index: index along that axis of the ranks that have it; None: all.
    """

    path: str
    change: FunctionChange
    axis: str = ""
    index: int | None = None


PlantedFault = CollectiveFault | FunctionFault | ModuleFault

RowsKind = Literal["text", "chat", "ids"]
"""text: a stream of bytes, or documents; chat: records with answers; ids: of a large vocabulary."""


@dataclass(frozen=True)
class MutantLayout:
    """The run in which a fault is planted.

    Attributes:
        mesh: "pp2 tp2".
        family: model family.
        options: further keys and values of `weft train`, as typed.
        documents: whether sequences are packed from short documents, so that numbers of targets
            differ.
        evaluates: whether the run evaluates every two steps.
        rows: other data than text, of a file beside those of texts.
    """

    mesh: str
    family: str = "llama3"
    options: str = ""
    documents: bool = False
    evaluates: bool = False
    rows: RowsKind = "text"

    def words(
        self, *, stream: str, documents: str, types: Literal["float64", "own"] = "float64"
    ) -> tuple[str, ...]:
        """Arguments of `weft train` for a run that is small enough to train, in which the fault must
        have an effect.

        Args:
            stream, documents: files with text, and with short documents.
            types: where the options have none; own: those of a run as users start it.
        """
        options = shlex.split(self.options)
        sizes = {**_by_key(small_words(self.family)), **DEFAULTS}
        words = self._data_words(stream, documents)
        for key, value in sizes.items():
            if key not in options:
                words += (key, value)
        words += options
        if types == "float64" and not set(FLOAT64).intersection(options):
            for key in FLOAT64:
                words += (key, "float64")
        return tuple(words)

    def user_words(self, *, stream: str, documents: str) -> tuple[str, ...]:
        """Arguments of `weft prove` for a user's run of the same layout: a published model, its
        vocabulary and context, a large batch; what is proved is its reduction.

        Args:
            stream, documents: as of `words`.
        """
        options = tuple(self._user_options())
        sizes = _by_key((*USER_MODELS[self.family], *USER_SIZES))
        words = self._data_words(stream, documents)
        for key, value in sizes.items():
            if key not in options:
                words += (key, value)
        return (*words, *options)

    def _user_options(self) -> Iterator[str]:
        """Its options without those that fit small runs alone."""
        is_left_out = False
        for word in shlex.split(self.options):
            if word.startswith("--"):
                is_left_out = word in SMALL_RUN_KEYS
            if not is_left_out:
                yield word

    def _data_words(self, stream: str, documents: str) -> list[str]:
        words = ["--mesh", self.mesh, "--model.name", self.family]
        if self.rows != "text":
            file, *options = ROW_FILES[self.rows]
            words += ("--data.source", str(Path(stream).with_name(file)), *options)
        elif self.documents:
            words += ("--data.source", documents, "--data.packing", "documents")
        else:
            words += ("--data.source", stream)
        if self.evaluates:
            words += ("--eval.every", "2", "--eval.source", stream)
        return words

    def __str__(self) -> str:
        """The user's run."""
        _, model, *more = USER_MODELS[self.family]
        words = [self.mesh or "one rank", " ".join((model, *more)).replace("--", "")]
        if self.documents:
            words.append("documents")
        if self.rows != "text":
            words.append(f"{self.rows} rows")
        options = " ".join(self._user_options()).replace("--", "")
        if options:
            words.append(options)
        return ", ".join(words)


@dataclass(frozen=True)
class Mutant:
    """A fault that trains wrong numbers without an error, and where a proof must see it first.

    Attributes:
        name: what is wrong, as an identifier.
        what: what goes wrong, in one line.
        layout: a run in which it has an effect.
        faults: what is planted.
        axes: mesh axes, one of which the report must name; empty: none.
        blocks: patterns of blocks, one of which the report must name; empty: the step as a whole.
        reference: published report of the same fault in another system.
        steps: optimizer steps that are needed to see it.
    """

    name: str
    what: str
    layout: MutantLayout
    faults: tuple[PlantedFault, ...]
    axes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    reference: str = ""
    steps: int = 3


FLOAT64 = ("--precision.params", "--precision.compute", "--precision.reduce")

DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "--data.seq_len": "16",
        "--batch.global_size": "4",
        "--batch.micro_size": "1",
        "--steps": "6",
        "--optim.warmup": "4",
        "--optim.lr": "0.01",
        "--optim.clip": "0.1",
        "--save.at_end": "False",
    }
)
"""Small, with a rate that changes every step, and a norm that is clipped in every step."""

USER_MODELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "llama3": ("--model.preset", "llama3-8b"),
        "gpt2": ("--model.preset", "gpt2-124m"),
        "mistral": ("--model.preset", "mistral-7b"),
        "qwen3": ("--model.preset", "qwen3-8b"),
        "qwen3-moe": ("--model.preset", "qwen3-moe-30b-a3b", "--model.balance_loss", "0.001"),
        "deepseek": ("--model.preset", "deepseek-v3-671b", "--model.mtp_depth", "1"),
        "gemma3": ("--model.preset", "gemma3-1b"),
        "qwen2": ("--model.preset", "qwen2-7b"),
        "weft_selftest.mutants.normed_model": ("--model.dim", "32", "--model.layers", "12"),
        "weft_selftest.mutants.wide_norm_model": ("--model.dim", "64", "--model.layers", "12"),
    }
)
"""The model of a user's run, by family."""
USER_SIZES = (
    *("--data.seq_len", "1024", "--batch.global_size", "64", "--steps", "10000"),
    *("--optim.lr", "0.001", "--optim.warmup", "500"),
    *("--parallel.logits", "whole"),
)
SMALL_RUN_KEYS = frozenset(
    (
        *("--batch.global_size", "--optim.warmup", "--eval.batches"),
        *("--data.seq_len", "--model.vocab", "--model.dim", "--model.experts", "--model.top_k"),
        *("--model.layers", "--model.heads", "--model.kv_heads"),
        "--model.rope_scaling_original_context",
    )
)
"""Options that fit small runs alone."""
ROW_FILES: Mapping[RowsKind, tuple[str, ...]] = MappingProxyType(
    {
        "chat": ("chat.jsonl", "--data.format", "chat", "--data.chat_template", "chatml"),
        "ids": ("ids.bin",),
    }
)
"""File of each kind of rows, and how it is read."""


def _by_key(words: Sequence[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))
