"""Where a stored model is: a run folder, one of its checkpoints, or a Hugging Face folder, recognised without torch."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError

from weft.checkpoint.folder import FOLDER, best_checkpoint, find_newest
from weft.checkpoint.format import MANIFEST, Facts
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.resume import check_model
from weft.config.families import run_type
from weft.config.hf.read_config import CONFIG, describe_folder
from weft.config.hf.safetensors_files import DTYPES, MAX_CONFIG_BYTES, list_tensors
from weft.config.keys import nest
from weft.config.load import load
from weft.config.run import Run
from weft.config.schema import DataConfig
from weft.core.model_config import ModelConfig
from weft.core.precision import Dtype
from weft.data.files import TOKEN_SUFFIX
from weft.data.prepared import sources_of, tokenizer_of
from weft.data.tokenizer import BYTES, FILE, KEY, Tokenizer, open_tokenizer
from weft.errors import CheckpointError, DataError, Fault, UserError
from weft.models import FAMILIES
from weft.small_files import UnreadableFile, open_regular, read_json_object

RUN = "run.toml"
END_TOKEN_FILES = ("generation_config.json", CONFIG)
"""Files of a Hugging Face folder that name the tokens that end a text; the first that does counts.
"""


@dataclass(frozen=True)
class ModelSource:
    """A stored model.

    Attributes:
        path: the checkpoint, or the Hugging Face folder.
        run: the run that it is of; of a Hugging Face folder only the model in it means something.
        dtype: in which it computes where nothing else is asked for.
        end_tokens: tokens that end a text, besides the tokenizer's own.
        notes: remarks on the choice, for the user.
        plain_notes: these, and what holds where linears compute in the type of compute.
    """

    path: Path
    kind: Literal["checkpoint", "hf"]
    run: Run
    dtype: Dtype
    end_tokens: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def plain_notes(self) -> tuple[str, ...]:
        if self.run.precision.linears != "fp8":
            return self.notes
        return (*self.notes, f"its linears were trained in fp8, and compute in {self.dtype} here")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that it was trained with.

        Raises:
            UserError: it is unknown, or is not where it was.
        """
        file = self.path / FILE
        if self.kind == "hf" and file.exists():
            return open_tokenizer(str(file), within=self.path)
        if self.kind == "hf":
            found = None
        else:
            found = tokenizer_of(self.run.data)
        if found is None or is_guess(found, self.run.data, self.run.model):
            what = f"nothing says which tokenizer belongs to {self.path}"
            if self.kind == "hf":
                what = f"{self.path} has no {FILE}"
            raise DataError(Fault(KEY, what, fix="--tokenizer FILE, its tokenizer.json, or bytes"))
        return found


def is_guess(found: Tokenizer, data: DataConfig, model: ModelConfig) -> bool:
    """Whether bytes are only the default, for token files of a larger vocabulary."""
    if found.name != BYTES:
        return False
    vocab = model.axis_sizes()["vocab"]
    if vocab <= found.vocab:
        return False
    return any(source.endswith(TOKEN_SUFFIX) for source in sources_of(data))


def only_model(places: Sequence[str], command: str, *, example: str) -> ModelSource:
    """The stored model that a command takes.

    Args:
        places: words beside the options.
        command: for the message, with `example`: what else it needs.

    Raises:
        UserError: none is named, or several; or as `find_model`.
    """
    if len(places) != 1:
        got, need = " ".join(places) or "nothing", "a run, a checkpoint or a folder"
        fix = f"for example {command} runs/first {example}"
        raise UserError(Fault(command, "takes one model", got=got, need=need, fix=fix))
    return find_model(places[0])


def find_model(word: str) -> ModelSource:
    """The stored model at a path.

    Raises:
        CheckpointError: nothing is there, it is no model, or a run that has saved nothing.
    """
    named = Path(os.path.expanduser(word))
    path = best_checkpoint(named) or named
    for mark, read in _READERS.items():
        if (path / mark).exists():
            return read(path)
    if not path.is_dir():
        what = "is no folder" if path.exists() else "no such folder"
        fix = "give a run's folder such as runs/first, one of its checkpoints, or a Hugging Face folder"
        raise CheckpointError(Fault("model", what, got=repr(word), fix=fix))
    need = f"{RUN} (a run), {MANIFEST} (a checkpoint) or {CONFIG} (Hugging Face)"
    raise CheckpointError(
        Fault(
            "model",
            "the folder holds no model",
            got=repr(str(path)),
            need=need,
            fix=_suggest_run(path),
        )
    )


def check_file(folder: Path, name: str) -> None:
    """Check that a file of a run folder is a regular file of this folder.

    Raises:
        CheckpointError: it is not, or cannot be read.
    """
    try:
        open_regular(folder / name, within=folder).close()
    except UnreadableFile as error:
        raise CheckpointError(error.fault()) from None


def _suggest_run(path: Path) -> str:
    runs = sorted(path.glob(f"*/{RUN}"))
    if runs:
        return f"give a run in it, such as {runs[-1].parent}"
    return "give the folder of a run"


def _read_run(path: Path) -> ModelSource:
    check_file(path, RUN)
    run = load([str(path / RUN)], FAMILIES)
    _check_is_language_model(path, run.model.name)
    found = find_newest(path)
    if found.path is None or found.manifest is None:
        if found.faults:
            raise CheckpointError(*found.faults)
        fix = "train with --save.every 100, which keeps checkpoints in the run's folder"
        raise CheckpointError(
            Fault(str(path), "the run has no checkpoint", got=f"nothing in {FOLDER}/", fix=fix)
        )
    facts = found.manifest.facts
    model = run.model
    check_model(found.path, facts, family=model.name, architecture=model.architecture)
    notes = tuple(f"{fault}; taking {found.path}" for fault in found.faults)
    return _source_of(found.path, run, notes)


def _source_of(path: Path, run: Run, notes: tuple[str, ...] = ()) -> ModelSource:
    return ModelSource(
        path=path, kind="checkpoint", run=run, dtype=run.precision.compute, notes=notes
    )


def _read_checkpoint(path: Path) -> ModelSource:
    facts = read_manifest(path).facts
    _check_is_language_model(path, facts.family)
    run = _run_of_checkpoint(path, facts)
    return _source_of(path, run)


def _run_of_checkpoint(path: Path, facts: Facts) -> Run:
    stored = facts.run or {"model": facts.architecture}
    try:
        run = run_type(facts.family, FAMILIES[facts.family].Config).model_validate_json(
            json.dumps(stored)
        )
        check_model(path, facts, family=run.model.name, architecture=run.model.architecture)
        return run
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        what = f"says of its run what this weft does not know: {key}: {first['msg']}"
        raise CheckpointError(Fault(str(path / MANIFEST), what)) from None


def _read_hf_folder(path: Path) -> ModelSource:
    described = describe_folder(path, FAMILIES)
    _check_is_language_model(path, described.family)
    fields = {**described.fields, **described.suggested}
    run = run_type(described.family, FAMILIES[described.family].Config).model_validate(
        {"model": nest(fields), **_scoring_of(path, num_labels=int(fields.get("labels", 0)))}
    )
    return ModelSource(
        path=path, kind="hf", run=run, dtype=_most_stored_dtype(path), end_tokens=_end_tokens(path)
    )


def _scoring_of(path: Path, *, num_labels: int) -> dict[str, Any]:
    """Loss and data of a run of a model that scores texts: of one label rewards, of several classes,
    by the names that its config gives them.
    """
    if not num_labels:
        return {}
    if num_labels == 1:
        return {"loss": "reward", "data": {"format": "reward"}}
    named = read_json_object(path / CONFIG, max_bytes=MAX_CONFIG_BYTES, within=path).get("id2label")
    names = dict(named) if isinstance(named, dict) else {}
    classes = tuple(str(names.get(str(at), f"LABEL_{at}")) for at in range(num_labels))
    return {"loss": "classify", "data": {"format": "classify", "classes": classes}}


def _most_stored_dtype(path: Path) -> Dtype:
    """The type of most bytes in a Hugging Face folder."""
    stored_bytes: Counter[str] = Counter()
    for entry in list_tensors(path).values():
        if entry.dtype in DTYPES:
            dtype, _ = DTYPES[entry.dtype]
            stored_bytes[dtype] += entry.stop - entry.start
    if not stored_bytes:
        return "float32"
    [(most, _)] = stored_bytes.most_common(1)
    return cast(Dtype, most)


def _end_tokens(path: Path) -> frozenset[int]:
    for name in END_TOKEN_FILES:
        try:
            file = read_json_object(path / name, max_bytes=MAX_CONFIG_BYTES, within=path)
        except UnreadableFile as error:
            if error.is_missing:
                continue
            raise CheckpointError(error.fault()) from None
        value = file.get("eos_token_id")
        if value is None:
            continue
        if isinstance(value, list):
            tokens = value
        else:
            tokens = [value]
        if not all(type(token) is int and token >= 0 for token in tokens):
            need = "a token, or a list of tokens"
            raise CheckpointError(
                Fault(
                    str(path / name),
                    "eos_token_id is wrong",
                    got=repr(value),
                    need=need,
                    fix="a token of the tokenizer, or leave it out",
                )
            )
        return frozenset(tokens)
    return frozenset()


def _check_is_language_model(path: Path, family: str) -> None:
    if family not in FAMILIES or FAMILIES[family].Config.kind != "tokens":
        language_models = [
            name for name, known in FAMILIES.items() if known.Config.kind == "tokens"
        ]
        need = f"a language model: {', '.join(language_models)}"
        raise CheckpointError(
            Fault(
                str(path),
                f"{family} generates no text",
                need=need,
                fix="name a run of such a model",
            )
        )


_READERS: Mapping[str, Callable[[Path], ModelSource]] = {
    MANIFEST: _read_checkpoint,
    RUN: _read_run,
    CONFIG: _read_hf_folder,
}
"""A file that only one kind of folder has -> how that is read."""
