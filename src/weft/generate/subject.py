"""Owns what a model is read from: a run, one of its checkpoints, or a Hugging Face folder; told apart without torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from weft.checkpoint.folder import FOLDER, find_newest
from weft.checkpoint.format import MANIFEST, Facts
from weft.checkpoint.manifest import read_manifest
from weft.config.families import run_type
from weft.config.hf.read_config import CONFIG, describe_folder
from weft.config.hf.safetensors_files import DTYPES, list_tensors
from weft.config.keys import nest
from weft.config.load import load
from weft.config.run import Run
from weft.core.precision import Dtype
from weft.data.files import TOKEN_SUFFIX
from weft.data.prepared import sources_of, tokenizer_of
from weft.data.tokenizer import BYTES, FILE, KEY, Tokenizer, open_tokenizer
from weft.errors import CheckpointError, DataError, Fault
from weft.models import FAMILIES

RUN = "run.toml"
ENDS = ("generation_config.json", CONFIG)
"""Files of a Hugging Face folder that say with which tokens a text ends; the first that does counts."""


@dataclass(frozen=True)
class Subject:
    """A stored model.

    Attributes:
        path: the checkpoint, or the Hugging Face folder.
        run: the run that it is of; of a Hugging Face folder only the model in it means something.
        dtype: in which it computes where nothing else is asked for.
        ends: tokens that end a text, besides the tokenizer's own.
        notes: what a person should hear of the choice.
    """

    path: Path
    kind: Literal["checkpoint", "hf"]
    run: Run
    dtype: Dtype
    ends: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that it was trained with.

        Raises:
            UserError: nobody knows which that is, or it is not where it was.
        """
        data, file = self.run.data, self.path / FILE
        if self.kind == "hf" and file.is_file():
            return open_tokenizer(str(file))
        found = None if self.kind == "hf" else tokenizer_of(data)
        reads_numbers = any(source.endswith(TOKEN_SUFFIX) for source in sources_of(data))
        if found is None or (
            found.name == BYTES and reads_numbers and self.run.model.axis_sizes()["vocab"] > found.vocab
        ):
            what = f"nothing says which tokenizer belongs to {self.path}"
            raise DataError(Fault(KEY, what, fix="--tokenizer FILE, its tokenizer.json, or bytes"))
        return found


def find_subject(word: str) -> Subject:
    """The model that a person means by a path.

    Raises:
        CheckpointError: nothing is there, it is no model, or a run that has saved nothing.
    """
    path = Path(word).expanduser()
    for mark, read in _KINDS.items():
        if (path / mark).exists():
            return read(path)
    if not path.is_dir():
        what = "no such folder" if not path.exists() else "is no folder"
        fix = "give a run's folder such as runs/first, one of its checkpoints, or a Hugging Face folder"
        raise CheckpointError(Fault(word or "weft generate", what, fix=fix))
    need = f"{RUN} (a run), {MANIFEST} (a checkpoint) or {CONFIG} (Hugging Face)"
    raise CheckpointError(Fault(str(path), "holds no model", need=need, fix=_nearby(path)))


def _nearby(path: Path) -> str:
    runs = sorted(path.glob(f"*/{RUN}"))
    return f"give a run in it, such as {runs[-1].parent}" if runs else "give the folder of a run"


def _of_run(path: Path) -> Subject:
    run = load([str(path / RUN)], FAMILIES)
    if FAMILIES[run.model.name].Config.kind != "tokens":
        raise CheckpointError(_no_text(path, run.model.name))
    found = find_newest(path)
    if found.path is None or found.manifest is None:
        if found.faults:
            raise CheckpointError(*found.faults)
        fix = "train with --save.every 100, which keeps checkpoints in the run's folder"
        raise CheckpointError(Fault(str(path), "the run has no checkpoint", f"nothing in {FOLDER}/", fix=fix))
    notes = tuple(f"{fault}; taking {found.path}" for fault in found.faults)
    return _of_facts(found.path, found.manifest.facts, run, notes)


def _of_checkpoint(path: Path) -> Subject:
    facts = read_manifest(path).facts
    if facts.family not in FAMILIES or FAMILIES[facts.family].Config.kind != "tokens":
        raise CheckpointError(_no_text(path, facts.family))
    kind = run_type(facts.family, FAMILIES[facts.family].Config)
    try:
        run = kind.model_validate_json(json.dumps(facts.run or {"model": facts.architecture}))
    except ValidationError as error:
        first = error.errors()[0]
        what = f"says of its run what this weft does not know: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointError(Fault(str(path / MANIFEST), what)) from None
    return _of_facts(path, facts, run, ())


def _of_facts(path: Path, facts: Facts, run: Run, notes: tuple[str, ...]) -> Subject:
    return Subject(path, "checkpoint", run, run.precision.compute, notes=notes)


def _of_hf(path: Path) -> Subject:
    described = describe_folder(path, FAMILIES)
    if FAMILIES[described.family].Config.kind != "tokens":
        raise CheckpointError(_no_text(path, described.family))
    kind = run_type(described.family, FAMILIES[described.family].Config)
    run = kind.model_validate({"model": nest(described.fields | described.suggested)})
    return Subject(path, "hf", run, _most_stored(path), ends=_ends(path))


def _most_stored(path: Path) -> Dtype:
    """The type of most bytes in a Hugging Face folder."""
    stored: Counter[Any] = Counter()
    for entry in list_tensors(path).values():
        if entry.dtype in DTYPES:
            stored[DTYPES[entry.dtype][0]] += entry.stop - entry.start
    most: Dtype = stored.most_common(1)[0][0] if stored else "float32"
    return most


def _ends(path: Path) -> frozenset[int]:
    for name in ENDS:
        try:
            value = json.loads((path / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset()


def _no_text(path: Path, family: str) -> Fault:
    texts = ", ".join(name for name, family in FAMILIES.items() if family.Config.kind == "tokens")
    return Fault(str(path), f"{family} writes no text", need=f"a language model: {texts}")


_KINDS: Mapping[str, Callable[[Path], Subject]] = {MANIFEST: _of_checkpoint, RUN: _of_run, CONFIG: _of_hf}
"""A file that only one kind of folder has -> how that is read."""
