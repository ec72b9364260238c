"""Proof of export and import: tensors keep their bits both ways, on any layout, and transformers computes the same logits."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint.folder import FOLDER
from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.saver import newest_path
from weft.checkpoint.state import MODEL
from weft.config.hf.read_config import CONFIG
from weft.config.load import load
from weft.config.lora import adapted_linear
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.hf.export_hf import export_hf
from weft.hf.import_hf import import_facts, import_hf
from weft.hf.match import mapping_of
from weft.models import FAMILIES
from weft.prove.against.hf_weights import Values
from weft.prove.against.support import LIBRARY
from weft.prove.inner_precision import inner_precision
from weft.prove.parts.comparisons import Compared, Comparisons
from weft.prove.parts.plain_export import WEIGHT, merged_plainly, read_plainly
from weft.prove.parts.plain_generation import plain_blocks, plain_outputs
from weft.prove.parts.stopped_run import fresh_records, train_part
from weft.prove.proof import Failed, in_number_types
from weft.prove.record import RankRecord, block_of
from weft.prove.report import Pass
from weft.prove.subject import Subject
from weft.prove.trained_part import TrainedPart
from weft.train.build import family_of

STEPS = 1
"""Steps that are trained first, so that tensors that start alike differ."""
MAX_FILE_BYTES = 2**15
"""Of a file of the exported folder, so that there are several."""
NARROW = "bfloat16"
"""Type of a second export."""
NUM_TOKENS = 24
SAME_BITS = "the same bits"
NOT_INSTALLED = f"not compared: logits of {LIBRARY}, which is not installed"


@dataclass(frozen=True)
class ExportProof:
    """The proof that an exported folder holds what a checkpoint holds.

    Attributes:
        subject: a model that transformers has; its mesh has no sites.
        meshes: other layouts that read the imported model.
    """

    subject: Subject
    meshes: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not compared."""
        return () if _has_library() else (NOT_INSTALLED,)

    def passes(self) -> Iterator[Pass | Failed]:
        """The comparisons, in order."""
        for each in in_number_types(self.subject):
            with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
                yield from _Export(each, Path(folder)).passes(self.meshes)


def _has_library() -> bool:
    return importlib.util.find_spec(LIBRARY) is not None


@dataclass(frozen=True)
class _Export:
    """The files of the comparison in one number type.

    Attributes:
        folder: empty.
    """

    subject: Subject
    folder: Path

    def passes(self, meshes: tuple[str, ...]) -> Iterator[Pass | Failed]:
        """The comparisons, in order. The caller takes no more after one that differs."""
        records = fresh_records(self.subject)
        part = TrainedPart(str(self.folder / "run"), STEPS, saves=True)

        def train_and_export() -> None:
            train_part(self.subject, records, part_of=lambda rank, attempt: part)
            self._export()

        failed = Failed.of(train_and_export, records, subject=self.subject)
        if failed is not None:
            yield failed
            return
        compared = partial(result_of, records=records, subject=self.subject)
        yield compared(lambda: self._compare_folder(self.exported, dtype=None))
        yield compared(lambda: self._compare_folder(self.narrow, dtype=torch.bfloat16))
        failed = Failed.of(self._import, records, subject=self.subject)
        if failed is not None:
            yield failed
            return
        for mesh in meshes:
            yield self._imported_pass(mesh)
        if _has_library():
            yield compared(self._compare_logits)

    # the way out

    @property
    def exported(self) -> Path:
        """The folder in the types of the checkpoint."""
        return self.folder / "exported"

    @property
    def narrow(self) -> Path:
        """The folder in 16 bits."""
        return self.folder / "narrow"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that is exported."""
        path = newest_path(self.folder / "run")
        assert path is not None, "the run has saved"
        return path

    def _export(self) -> None:
        """As `weft export`, once in the types of the checkpoint, and once in 16 bits."""
        for folder, dtype in ((self.exported, None), (self.narrow, NARROW)):
            export_hf(
                self.checkpoint,
                folder,
                dtype=dtype,
                max_shard_bytes=MAX_FILE_BYTES,
                sidecar_folders=(),
                compares=False,
            )

    @cached_property
    def right(self) -> Mapping[str, Tensor]:
        """Whole parameters of the model without adapters, as the checkpoint has them."""
        stored = open_checkpoint(self.checkpoint).section(MODEL)
        whole = {name: stored.read(name, Box.whole(shape)) for name, shape in stored.shapes.items()}
        return merged_plainly(whole, self.subject.run.lora)

    @property
    def merged(self) -> frozenset[str]:
        """Parameters into which an adapter is merged."""
        stored = open_checkpoint(self.checkpoint).section(MODEL)
        linears = {adapted_linear(name) for name in stored.shapes} - {None}
        return frozenset(f"{linear}{WEIGHT}" for linear in linears)

    def bound(self, name: str) -> float:
        """0, or for a sum of products a rounding of its type."""
        if name not in self.merged:
            return 0.0
        return 2 * torch.finfo(self.right[name].dtype).eps

    def _compare_folder(self, folder: Path, *, dtype: torch.dtype | None) -> Pass:
        """The tensors of a folder, read by weft's names, and its config.json."""
        found = Comparisons(self.subject.mesh)
        self._compare_config(found, folder)
        read = read_plainly(folder, self.subject.model)
        for name, right in self.right.items():
            what = _tensor("export", name)
            if name not in read:
                found.fail(what, "not there", ranks=(0,), measured=1.0)
                continue
            value = read[name]
            expected = right.to(value.dtype) if value.dtype == dtype else right
            self._check(found, what, value, expected, ranks=(0,))
        types = self.subject.types_text if dtype is None else f"{NARROW} files"
        return found.as_pass(f"{types}, export of {self.subject.mesh}", SAME_BITS)

    def _compare_config(self, found: Comparisons, folder: Path) -> None:
        """Each key of config.json, read as `weft import` reads it."""
        model = self.subject.model
        named = ["--model.name", model.name] if FAMILIES.is_user_model(model.name) else []
        read = load([*named, "--model.from_hf", str(folder)], FAMILIES).model
        for row in mapping_of(model.family).config.keys:
            value = getattr(read, row.field)
            right = getattr(model, row.field)
            if value == right:
                continue
            what = Compared(f"{CONFIG}: {row.hf_key}", "export", STEPS)
            text = f"{value!r} in place of {right!r}"
            found.fail(what, text, ranks=(0,), measured=1.0)

    def _check(
        self,
        found: Comparisons,
        what: Compared,
        value: Tensor,
        expected: Tensor,
        *,
        ranks: tuple[int, ...],
    ) -> None:
        bound = self.bound(what.parameter)
        if bound and value.dtype != self.right[what.parameter].dtype:
            bound = max(bound, torch.finfo(value.dtype).eps)  # the sum is rounded once more
        found.check(what, value, expected, ranks=ranks, bound=bound)

    # the way back

    @property
    def imported(self) -> Path:
        """The run folder of the import."""
        return self.folder / "imported"

    def _import(self) -> None:
        """Import the exported folder as `weft import` does."""
        base = self._without_adapters()
        facts = import_facts(base.model, seed=base.run.seed, tokenizer=base.run.data.tokenizer)
        import_hf(
            self.exported,
            self.imported,
            base.model,
            facts=facts,
            run_toml="",
            advice="",
            compares=False,
            chunk_bytes=MAX_FILE_BYTES,
        )

    def _imported_pass(self, mesh: str) -> Pass | Failed:
        """The import, read by the ranks of a layout."""
        subject = self._without_adapters().on_mesh(mesh)
        assert subject is not None, "the meshes are valid"
        records = fresh_records(subject)
        resume = str(self.imported / FOLDER)
        part = TrainedPart(str(self.folder / "resumed"), 0, resume=resume)
        failed = Failed.of(
            lambda: train_part(subject, records, part_of=lambda rank, attempt: part),
            records,
            subject=subject,
        )
        return failed or self._compare_ranks(subject, records)

    def _without_adapters(self) -> Subject:
        """The run of the exported model, whose adapters are merged."""
        none = LoraConfig()
        changed = self.subject.with_values({"lora": none, "model.from_hf": None})
        family = family_of(changed.model, none, neftune=changed.run.neftune)
        return replace(changed, family=family)

    def _compare_ranks(self, subject: Subject, records: list[RankRecord]) -> Pass:
        """What each rank holds after the import."""
        found = Comparisons(subject.mesh)
        for record in records:
            for site, observed in record.values.items():
                is_value = site.phase == "checkpoint" and site.tensor == site.parameter
                if not is_value:
                    continue
                right = observed.place.read(self.right[site.parameter])
                assert right is not None, "boxes lie in the parameter"
                expected = right.to(observed.value.dtype)
                what = _tensor("import", site.parameter)
                self._check(found, what, observed.value, expected, ranks=(record.rank,))
        return found.as_pass(f"{subject.types_text}, import on {subject.mesh}", SAME_BITS)

    # transformers

    def _compare_logits(self) -> Pass:
        """Logits of the folder in transformers, and those of the stored values, in float64.

        Weights with a merged adapter are those of the folder: they have been compared, and their
        rounding would show in the logits.
        """
        from weft.prove.parts.hf_logits import HFLogits  # late: an extra

        found = Comparisons(self.subject.mesh)
        tokens_BS = self._tokens()
        hf = HFLogits(self.exported, tokens_BS)
        subject = self._without_adapters()
        values = dict(self.right)
        if self.merged:
            folder = read_plainly(self.exported, self.subject.model)
            values.update({name: folder[name] for name in self.merged if name in folder})
        blocks = plain_blocks(subject.family, subject.model, Values(values))
        inner = inner_precision(
            subject.family, subject.model, dtype=torch.float64, seq_len=NUM_TOKENS
        )
        bound = max(hf.bound, inner.rounding(len(blocks)))
        for row, right_SV in enumerate(hf.compute()):
            what = Compared(f"logits of sequence {row}", "export", STEPS, block="head")
            *_, logits_SV = plain_outputs(blocks, [tokens_BS[row].tolist()]).values()
            found.check(what, logits_SV, right_SV, ranks=(0,), bound=bound)
        return found.as_pass(f"float64, logits of {LIBRARY}", hf.source)

    def _tokens(self) -> Tensor:
        """Two sequences, [B, S]."""
        model = self.subject.model
        length = min(NUM_TOKENS, model.architecture.get("max_seq_len", NUM_TOKENS))
        generator = torch.Generator().manual_seed(self.subject.run.seed)
        vocab = model.axis_sizes()["vocab"]
        return torch.randint(vocab, (2, length), generator=generator)


def result_of(
    compare: Callable[[], Pass], *, records: Sequence[RankRecord], subject: Subject
) -> Pass | Failed:
    """A comparison, or the error that ended it."""
    found: list[Pass] = []
    failed = Failed.of(lambda: found.append(compare()), records, subject=subject)
    return failed or found[0]


def _tensor(phase: str, name: str) -> Compared:
    """A parameter on its way out or back."""
    return Compared(
        name,
        "import" if phase == "import" else "export",
        STEPS,
        block=block_of(name),
        parameter=name,
    )
