"""Proof of generation: texts with caches, on the layout, are those of whole forwards without a cache on one device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.checkpoint.read import open_checkpoint
from weft.checkpoint.saver import newest_path
from weft.checkpoint.state import MODEL
from weft.comm.comm import Comm
from weft.config.schema import PrecisionConfig
from weft.core.mesh import Mesh
from weft.data.tokenizer import BYTES, open_tokenizer
from weft.generate.cache import install_kv_cache
from weft.generate.decode import RowShares, TextRow, decode, load_model
from weft.generate.job import SUPPORTED_AXES, GenerationJob, inference_model, max_positions
from weft.generate.model_source import ModelSource
from weft.generate.request import Request
from weft.generate.sample import Sampling, TokenPosition, sample_token
from weft.models.user_family import UserFamily
from weft.parallel.model.parallelize import ParallelModel
from weft.prove.bounds import TOLERANCE
from weft.prove.parts.comparisons import Compared, Comparisons
from weft.prove.parts.plain_generation import (
    PlainTexts,
    generate_plainly,
    is_generating,
    plain_blocks,
    plain_outputs,
)
from weft.prove.parts.prompts import Prompt, prompts_of
from weft.prove.parts.stopped_run import fresh_records
from weft.prove.parts.watched_decoder import TokenPlace, WatchedDecoder
from weft.prove.plain_fp8 import use_plain_fp8
from weft.prove.proof import Failed
from weft.prove.raw_batch import batch_of, samples_of_step
from weft.prove.record import RankRecord
from weft.prove.report import Pass
from weft.prove.subject import Subject
from weft.prove.trained_part import TrainedPart
from weft.run.run_ranks import run_ranks
from weft.train.build import family_of

SAMPLING = Sampling(temperature=0.8, seed=1)
TIMEOUT_S = 3600.0
STEPS = 1
"""Steps that are trained first, so that no bias is zero."""
MOST_LOGITS = 2**22
"""Tokens times the vocabulary, up to which a prompt is so long that the cache grows."""


@dataclass
class RankTexts:
    """What one rank generates.

    Attributes:
        tokens: of each prompt, the new ones.
        outputs: (place of a token, block) -> what the block computes before it, for the prompts and
            blocks of the rank.
        logits: place of a token -> logits_V that give it, on ranks of the last stage.
    """

    tokens: list[list[int]] = field(default_factory=list)
    outputs: dict[tuple[TokenPlace, str], Tensor] = field(default_factory=dict)
    logits: dict[TokenPlace, Tensor] = field(default_factory=dict)


def generation_passes(subject: Subject) -> Iterator[Pass | Failed]:
    """The comparisons in float64: after training, on the run's own ranks, as `sample`; and from a
    checkpoint, on the axes that `weft generate` takes.

    Args:
        subject: a language model; its mesh has no sites.

    Raises:
        PlanError: an attention of the model computes no cache.
    """
    exact = subject.in_float64()
    config = inference_model(exact.model)
    family = family_of(config, exact.run.lora)
    install_kv_cache({0: nn.ModuleDict(family.blocks(config))})  # a model without caches ends here
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
        yield from _GenerationProof(exact, Path(folder) / "run", _prompts(exact)).passes()


def _prompts(subject: Subject) -> tuple[Prompt, ...]:
    """Prompts from the first batch of the run."""
    run = subject.run
    numbers = samples_of_step(subject.samples, 0, global_size=run.batch.global_size, seed=run.seed)
    batch = batch_of(subject.samples, numbers, later=False)
    limit = max_positions(run.model)
    vocab = run.model.axis_sizes()["vocab"]
    longest = prompts_of([0], most_positions=None, is_long=True)[-1]
    num_tokens = len(longest.tokens) + longest.num_new
    if limit is None and not _takes(subject, [0] * num_tokens):
        limit = run.data.seq_len  # its code has a table of positions that no field names
    return prompts_of(
        batch.inputs.flatten().tolist(),
        most_positions=limit,
        is_long=limit is None and num_tokens * vocab <= MOST_LOGITS,
    )


def _takes(subject: Subject, text: Sequence[int]) -> bool:
    """Whether a user's model computes a text of this length; weft's own families compute any."""
    config = inference_model(subject.model)
    family = family_of(config, subject.run.lora)
    if not isinstance(getattr(family, "plain", family), UserFamily):
        return True
    blocks = family.blocks(config)
    try:
        plain_outputs(
            {name: block.double() for name, block in blocks.items() if is_generating(name)}, [text]
        )
    except Exception:  # noqa: BLE001 - a user's forward may raise anything
        return False
    return True


@dataclass(frozen=True)
class _GenerationProof:
    """The comparison of texts and logits of a layout with those of one device.

    Attributes:
        subject: in float64.
        out: run folder.
    """

    subject: Subject
    out: Path
    prompts: tuple[Prompt, ...]

    def passes(self) -> Iterator[Pass | Failed]:
        """The comparisons, in order."""
        records = fresh_records(self.subject)
        texts: list[RankTexts] = []

        def generate_after_training() -> None:
            run = partial(self._train_and_generate, records)
            texts.extend(self._run(self.subject.mesh, run))

        failed = Failed.of(generate_after_training, records, subject=self.subject)
        if failed is not None:
            yield failed
            return
        right = self._plain_texts(self.subject.run.precision)
        mesh = self.subject.mesh
        yield self._compared(mesh, texts, right, f"after training, on {mesh}")
        job = self._job()
        mesh = job.request.device_mesh
        texts.clear()
        if self.subject.has_fp8:  # `weft generate` computes in the type of compute
            right = self._plain_texts(None)

        def generate_from_checkpoint() -> None:
            texts.extend(self._run(mesh, partial(self._generate_from_checkpoint, job)))

        failed = Failed.of(generate_from_checkpoint, records, subject=self.subject)
        if failed is not None:
            yield failed
            return
        yield self._compared(mesh, texts, right, f"from a checkpoint, on {mesh}")

    # on the layout

    def _run(self, mesh: Mesh, rank: Callable[[Comm], RankTexts]) -> list[RankTexts]:
        return run_ranks(mesh, rank, timeout_s=TIMEOUT_S, takes_turns=True)

    def _train_and_generate(self, records: Sequence[RankRecord], comm: Comm) -> RankTexts:
        """Texts of the model that this rank has trained."""
        record = records[comm.rank]
        part = TrainedPart(str(self.out), STEPS, saves=True)
        try:
            training = part.train(self.subject, comm, record=record)
            return self._generate(training.step.model)
        except Exception as error:
            record.error = error
            raise

    def _job(self) -> GenerationJob:
        """As `weft generate` makes it, with prompts of tokens."""
        axes = self.subject.mesh.axes
        words = [f"{name}{degree}" for name, degree in axes if name in SUPPORTED_AXES]
        path = newest_path(self.out)
        assert path is not None, "the run has saved"
        return GenerationJob(
            request=Request(mesh=" ".join(words)),
            source=ModelSource(path, "checkpoint", self.subject.run, dtype="float64"),
            config=inference_model(self.subject.model),
            dtype="float64",
            tokenizer=open_tokenizer(BYTES),
            prompts=(),
            tokens=tuple(prompt.tokens for prompt in self.prompts),
        )

    def _generate_from_checkpoint(self, job: GenerationJob, comm: Comm) -> RankTexts:
        model = load_model(
            family_of(job.config, self.subject.run.lora),
            job.config,
            open_checkpoint(job.source.path).section(MODEL),
            plan=job.plan,
            comm=comm,
        )
        return self._generate(model)

    def _generate(self, model: ParallelModel) -> RankTexts:
        """All texts; every rank calls it."""
        rows = [TextRow(prompt.tokens, sample=number) for number, prompt in enumerate(self.prompts)]
        config = self.subject.model
        decoder = WatchedDecoder(
            model,
            vocab=config.axis_sizes()["vocab"],
            max_positions=max_positions(config),
            prompts=[row.sample for row in RowShares(rows, model.comm).own],
        )
        found = RankTexts(outputs=decoder.outputs)

        def choose(logits_V: Tensor, at: TokenPosition) -> int:
            found.logits[TokenPlace(*at)] = logits_V.clone()
            return sample_token(logits_V, SAMPLING, at)

        def is_finished(row: TextRow) -> bool:
            return len(row.tokens) == self.prompts[row.sample].num_new

        for _ in decode(decoder, rows, choose=choose, is_finished=is_finished):
            pass
        found.tokens = [row.tokens for row in rows]
        return found

    # on one device

    def _plain_texts(self, precision: PrecisionConfig | None) -> PlainTexts:
        path = newest_path(self.out)
        assert path is not None, "the run has saved"
        config = inference_model(self.subject.model)
        family = family_of(config, self.subject.run.lora, precision=precision)
        blocks = plain_blocks(family, config, open_checkpoint(path).section(MODEL))
        use_plain_fp8(blocks)
        return generate_plainly(
            blocks,
            self.prompts,
            sampling=SAMPLING,
            has_documents=self.subject.run.data.packing == "documents",
        )

    # both

    def _compared(
        self, mesh: Mesh, texts: Sequence[RankTexts], right: PlainTexts, what: str
    ) -> Pass:
        """Compare outputs of blocks and logits, then tokens, in the order of their computation."""
        found = Comparisons(mesh)
        # with a cache, a model that casts inside rounds in another order
        num_blocks = max(map(len, right.outputs.values()))
        bound = max(TOLERANCE, self.subject.inner.rounding(num_blocks))
        for place in sorted(right.outputs, key=self._order):
            for rank, of_rank in enumerate(texts):
                self._compare_place(
                    found, place, right=right, of_rank=of_rank, rank=rank, bound=bound
                )
        for rank, of_rank in enumerate(texts):
            for number, tokens in enumerate(of_rank.tokens):
                found.check(
                    Compared(f"tokens of prompt {number}", "generation", STEPS),
                    torch.tensor(tokens),
                    torch.tensor(right.tokens[number]),
                    ranks=(rank,),
                    bound=0.0,
                )
        return found.as_pass(f"float64, texts {what}", f"{bound:.0e}")

    def _compare_place(
        self,
        found: Comparisons,
        place: TokenPlace,
        *,
        right: PlainTexts,
        of_rank: RankTexts,
        rank: int,
        bound: float,
    ) -> None:
        """What a rank computes before a token, where the text before that is right."""
        num_given = len(self.prompts[place.prompt].tokens)
        num_new = place.position - num_given
        before = tuple(of_rank.tokens[place.prompt][:num_new])
        # After a first wrong token the rest is of another text, which says nothing of the computation.
        if before != right.tokens[place.prompt][:num_new]:
            return
        kind = "prefill" if num_new == 0 else f"token {num_new} after it"
        where = f"prompt {place.prompt} of {num_given} tokens, {kind}"
        outputs = right.outputs[place]
        *_, last = outputs
        for block, expected in outputs.items():
            is_last = block == last
            name = "logits" if is_last else f"{block}.output"
            logits_V = of_rank.logits.get(place)
            value = logits_V if is_last else of_rank.outputs.get((place, block))
            if value is None:
                continue
            found.check(
                Compared(f"{name} of {where}", "generation", STEPS, block=block),
                value.cpu(),
                expected,
                ranks=(rank,),
                bound=bound,
            )

    def _order(self, place: TokenPlace) -> tuple[int, int]:
        """The sort key of a place: its decode step, then its prompt."""
        num_given = len(self.prompts[place.prompt].tokens)
        return place.position - num_given, place.prompt
