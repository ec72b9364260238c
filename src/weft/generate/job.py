"""Owns the checks between what is asked for and the model that is there, and the job that they make. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weft.config import validate
from weft.config.checks import Check, run_checks
from weft.config.run import Run
from weft.config.schema import BatchConfig, ParallelConfig, PipelineConfig, PrecisionConfig
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.data.tokenizer import Tokenizer, open_tokenizer
from weft.errors import ConfigError, Fault, UserError
from weft.generate.request import Request, read_prompts
from weft.generate.subject import Subject
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.parallel.ep import AXIS as EP

SERVED = ("pp", "ep", "tp")
WHY_NOT = {
    "dp": "dp would write the same texts again: one call takes any number of --samples",
    "cp": "cp cuts long sequences, and what is kept of them here is cut over the heads by tp",
}


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    Attributes:
        run: the stored model's run, on the mesh that was asked for.
        prompts: their text.
        tokens: their tokens.
    """

    request: Request
    subject: Subject
    run: Run
    tokenizer: Tokenizer
    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def config(self) -> ModelConfig:
        """The model without what only training reads."""
        return self.run.model

    @property
    def context(self) -> int | None:
        """Positions that the model has; None where it makes as many as it needs."""
        return context_of(self.config)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text."""
        own = self.tokenizer.end
        return self.subject.ends if own is None else self.subject.ends | {own}

    @property
    def plan(self) -> Plan:
        """Who computes what."""
        kind = self.run.precision.compute
        return Plan(
            mesh=self.run.device_mesh,
            family=self.run.model.name,
            architecture=canonical_json(self.run.model.architecture),
            stages=make_stages(self.config.block_specs(1), self.run.num_stages),
            params=kind,
            compute=kind,
            reduce=kind,
        )

    def notes(self) -> Iterator[str]:
        """What is no fault and worth a line."""
        yield from self.subject.notes
        longest = max(map(len, self.tokens))
        if self.context is not None and longest + self.request.tokens > self.context:
            what = f"a prompt of {longest} tokens and {self.request.tokens} more"
            yield f"{what} pass the model's {self.context} positions: texts end there"


def make_job(request: Request, subject: Subject, surroundings: Iterable[Check] = ()) -> Job:
    """The job, every part of it checked.

    Raises:
        UserError: with every fault of mesh, prompts and surroundings.
    """
    run = _run_of(request, subject)
    faults = [*_mesh_faults(run.device_mesh), *run_checks(run, (*MESH_CHECKS, *surroundings))]
    try:
        tokenizer = _tokenizer_of(request, subject)
        texts = read_prompts(request)
        tokens = tuple(_tokens(text, tokenizer, vocab=run.model.axis_sizes()["vocab"]) for text in texts)
        faults += [fault for each in tokens for fault in _length_faults(each, run.model)]
    except UserError as error:
        raise UserError(*faults, *error.faults) from None
    if faults:
        raise UserError(*dict.fromkeys(faults))
    return Job(request, subject, run, tokenizer, texts, tokens)


def _run_of(request: Request, subject: Subject) -> Run:
    """The stored model on another mesh; nothing of how it was trained is left."""
    kind = request.dtype or subject.dtype
    lean = {"mtp_depth": 0} if subject.run.model.reads_later_targets else {}
    return subject.run.model_copy(
        update={
            "mesh": request.grid.text,
            "nproc": None,
            "port": None,
            "device": request.device,
            "transport": request.transport,
            "batch": BatchConfig(global_size=1, micro_size=1),
            "parallel": ParallelConfig(),
            "pipeline": PipelineConfig(),
            "precision": PrecisionConfig(params=kind, compute=kind, reduce=kind),
            "model": subject.run.model.model_copy(update=lean),
            "out": None,
        }
    )


def _mesh_faults(mesh: Mesh) -> Iterator[Fault]:
    for name, degree in mesh.axes:
        if name not in SERVED and degree > 1:
            rest = " ".join(f"{other}{size}" for other, size in mesh.axes if other in SERVED)
            fix = f"--mesh {rest} or" if rest else "leave it out, or"
            yield Fault("mesh", WHY_NOT[name], mesh.text, "pp, ep and tp alone", f"{fix} give its ranks to tp")


def _experts_exist(run: Run) -> Iterator[Fault]:
    return (replace(fault, fix="give its ranks to tp") for fault in validate.dimension_faults(run, EP))


MESH_CHECKS = (
    Check(("mesh", "model"), validate.axes_divide),
    Check(("mesh", "model"), _experts_exist),
    Check(("mesh", "model"), validate.layers_make_stages),
)


def _tokenizer_of(request: Request, subject: Subject) -> Tokenizer:
    try:
        return open_tokenizer(request.tokenizer) if request.tokenizer else subject.tokenizer()
    except UserError as error:
        mend = "--tokenizer FILE, its tokenizer.json, or bytes"
        raise ConfigError(*(replace(fault, key="tokenizer", fix=fault.fix or mend) for fault in error.faults)) from None


def _tokens(text: str, tokenizer: Tokenizer, *, vocab: int) -> tuple[int, ...]:
    """The tokens of a prompt; an empty one begins a document, where the tokenizer has a token between documents."""
    tokens = tuple(tokenizer.encode(text))
    if not tokens and tokenizer.end is None:
        what = f"is empty, and the tokenizer {tokenizer.name} has no token that begins a document"
        raise ConfigError(Fault("prompt", what, need="one token at least", fix='for example --prompt "def "'))
    tokens = tokens or (tokenizer.end or 0,)
    if max(tokens) >= vocab:
        what = f"has token {max(tokens)} of the tokenizer {tokenizer.name}, which the model does not know"
        raise ConfigError(Fault("prompt", what, need=f"tokens below {vocab}", fix="--tokenizer FILE, the model's own"))
    return tokens


def _length_faults(tokens: tuple[int, ...], config: ModelConfig) -> Iterator[Fault]:
    context = context_of(config)
    if context is not None and len(tokens) >= context:
        what = "leaves no position for another token"
        yield Fault(
            "prompt", what, f"{len(tokens)} tokens", f"fewer than the model's {context} positions", "shorten it"
        )


def context_of(config: ModelConfig) -> int | None:
    """Positions that a model learns; None where it makes them."""
    longest: int | None = getattr(config, "max_seq_len", None)
    return longest if longest is not None and config.check_seq_len(longest + 1) is not None else None
