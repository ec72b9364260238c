"""Import: a Hugging Face folder becomes a run folder with a checkpoint of step 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.commit import commit, discard
from weft.checkpoint.folder import FOLDER, checkpoint_path, temporary_path
from weft.checkpoint.format import Facts, Manifest
from weft.checkpoint.source import Source
from weft.checkpoint.write import start_write
from weft.checkpoint.write_item import WriteItem
from weft.config.schema import ModelSection
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.hf.check_logits import NOT_COMPARED, compare_logits
from weft.hf.folder import HfFolder, slabs
from weft.hf.sidecar import read_sidecars, write_sidecars
from weft.view.quantity import count, memory

CHUNK_BYTES = 2**30
"""Bytes in memory at a time, and the size of one file of the checkpoint."""


@dataclass(frozen=True)
class TransferResult:
    """Report of an import or export.

    Attributes:
        lines: for the user.
        is_equal: transformers computes the same logits, or they were not compared.
    """

    lines: tuple[str, ...]
    is_equal: bool


def import_facts(model: ModelSection, *, seed: int, tokenizer: str) -> Facts:
    """The facts of the checkpoint of an imported model, which no layout has written.

    Args:
        tokenizer: `data.tokenizer` of the run.
    """
    return Facts(
        step=0,
        seed=seed,
        family=model.name,
        architecture=model.architecture,
        plan={},
        run={"model": model.model_dump(mode="json"), "data": {"tokenizer": tokenizer}},
    )


def import_hf(
    folder: Path,
    out: Path,
    cfg: ModelConfig,
    *,
    facts: Facts,
    run_toml: str,
    compares: bool,
    advice: str,
    chunk_bytes: int = CHUNK_BYTES,
) -> TransferResult:
    """Write the run folder `out`: the checkpoint of step 0, run.toml, the small files of `folder`.

    Args:
        cfg: the model that `folder` describes.
        facts: of the checkpoint.
        run_toml: content of run.toml.
        compares: whether to end with a comparison with transformers.
        advice: how the run is trained, for the last line.

    Raises:
        CheckpointError: a tensor has another shape than config.json makes of it, or a disk
            error occurs.
    """
    source = HfFolder(folder, cfg)
    manifest = import_params(out, source, facts, chunk_bytes=chunk_bytes)
    write_sidecars(out, read_sidecars([folder]))
    (out / "run.toml").write_text(run_toml, encoding="utf-8")
    if compares:
        comparison = compare_logits(folder, source, cfg)
    else:
        comparison = NOT_COMPARED
    size = f"{memory(manifest.num_bytes)}"
    lines = (
        f"{folder}: {count_params(source)}, {size}, now {out / FOLDER / 'step-000000'}",
        *source.notes,
        str(comparison),
        advice,
    )
    return TransferResult(lines, comparison.is_equal)


def import_params(
    run_folder: Path, source: Source, facts: Facts, *, chunk_bytes: int = CHUNK_BYTES
) -> Manifest:
    """Write the checkpoint of step `facts.step`, with the section `model` alone.

    Raises:
        CheckpointError: it exists already, or a disk error occurs; what was written is removed then.
    """
    final = checkpoint_path(run_folder, facts.step)
    tmp = temporary_path(final)
    discard(tmp)
    num_ranks = 0
    try:
        for chunk in _chunks(source, chunk_bytes):
            start_write(tmp, num_ranks, chunk).wait()
            chunk.clear()
            num_ranks += 1
    except BaseException:
        discard(tmp)
        raise
    return commit(tmp, final, facts, ranks=num_ranks)


def count_params(source: Source) -> str:
    """Number of parameters, for the user."""
    entries = sum(Box.whole(shape).size for shape in source.shapes.values())
    return f"{count(entries)} parameters"


def _chunks(source: Source, chunk_bytes: int) -> Iterator[list[WriteItem]]:
    """Slabs of all parameters, in lists of at most `chunk_bytes` or of one slab."""
    chunk: list[WriteItem] = []
    filled = 0
    for name, shape in source.shapes.items():
        for box in slabs(shape):
            item = WriteItem(
                name=f"model/{name}", shape=shape, box=box, tensor=source.read(name, box)
            )
            if chunk and filled + item.num_bytes > chunk_bytes:
                yield chunk
                chunk = []
                filled = 0
            chunk.append(item)
            filled += item.num_bytes
    yield chunk
