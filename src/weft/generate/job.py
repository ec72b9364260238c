"""What a run of `weft generate` computes: the checked request, the stored model, and tokens of the prompts. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.config.rules import layout
from weft.config.schema import ModelSection, ParallelConfig, PipelineConfig
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.core.precision import Dtype
from weft.data.chat_template import (
    ASSISTANT,
    ChatTemplate,
    Message,
    TemplateFault,
    find_template,
    template_fault,
)
from weft.data.chat_template import KEY as TEMPLATE_KEY
from weft.data.prepared import prepared_of, sources_of
from weft.data.tokenizer import Tokenizer, open_tokenizer
from weft.errors import ConfigError, DataError, Fault, UserError, counted
from weft.generate.model_source import ModelSource
from weft.generate.request import Request, SamplingOptions, read_prompts
from weft.layout.plan import Plan, canonical_json, make_stages, sharding_rule_of
from weft.models.user_config import CONTEXT_FIELDS
from weft.parallel.cp import AXIS as CP
from weft.parallel.dp import AXIS as DP
from weft.parallel.ep import AXIS as EP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP

EXAMPLE, EXAMPLE_ANSWER = "question", "answer"
"""Texts by which the end of an answer is found in what a template renders."""
SUPPORTED_AXES = (PP, EP, TP)
UNSUPPORTED_AXES = {
    DP: "dp would generate the same texts again: one call takes any number of --samples",
    CP: "cp shards long sequences, and the cache of keys and values is sharded over the heads by tp",
}


@dataclass(frozen=True)
class ModelJob:
    """A stored model with checked options, as every rank gets it.

    Attributes:
        config: the model without what only training reads.
        dtype: in which it computes.
    """

    request: SamplingOptions
    source: ModelSource
    config: ModelSection
    dtype: Dtype
    tokenizer: Tokenizer

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has learned; None: it computes any number."""
        return max_positions(self.config)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        own = self.tokenizer.end
        if own is None:
            return self.source.end_tokens
        return self.source.end_tokens | {own}

    @property
    def plan(self) -> Plan:
        """The layout on which the model generates."""
        mesh = self.request.device_mesh
        # regions of tp are found with the lengths of training: one token would be broadcast
        seq_len = self.source.run.data.seq_len
        return Plan(
            mesh=mesh,
            family=self.config.name,
            architecture=canonical_json(self.config.architecture),
            stages=make_stages(self.config.block_specs(seq_len), mesh.degree(PP)),
            rule=sharding_rule_of(mesh, self.config.axis_sizes()),
            seq_len=seq_len,
            params=self.dtype,
            compute=self.dtype,
            reduce=self.dtype,
        )


@dataclass(frozen=True)
class GenerationJob(ModelJob):
    """A checked request of `weft generate`.

    Attributes:
        prompts: their text.
        tokens: their tokens.
    """

    request: Request
    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    def notes(self) -> Iterator[str]:
        """Remarks on the job that are no faults."""
        yield from self.source.plain_notes
        if self.max_positions is None:
            return
        longest = max(len(tokens) for tokens in self.tokens)
        num_new = self.request.tokens
        if longest + num_new > self.max_positions:
            prompt = counted(longest, "token")
            yield (
                f"a prompt of {prompt} and {num_new} more pass the model's {self.max_positions} "
                "positions: texts end there"
            )


def make_job(
    request: Request, source: ModelSource, other_faults: Iterable[Fault] = ()
) -> GenerationJob:
    """The job, every part of it checked.

    Args:
        other_faults: of the environment, reported with those found here.

    Raises:
        UserError: with every fault of mesh, prompts and environment.
    """
    config = inference_model(source.run.model)
    faults = [*mesh_faults(request.device_mesh, config), *other_faults]
    vocab = config.axis_sizes()["vocab"]
    try:
        tokenizer = open_model_tokenizer(request, source)
        prompts = read_prompts(request)
        texts = prompts
        if request.chat:
            chat = chat_format(request, source, tokenizer)
            texts = tuple(map(chat.render, prompts))
            request = request.model_copy(update={"stop": request.stop or chat.stop})
        tokens = tuple(encode_prompt(text, tokenizer, vocab=vocab) for text in texts)
    except UserError as error:
        raise UserError(*faults, *error.faults) from None
    for prompt_tokens in tokens:
        faults.extend(_length_faults(prompt_tokens, config))
    if faults:
        raise UserError(*dict.fromkeys(faults))
    return GenerationJob(
        request=request,
        source=source,
        config=config,
        dtype=request.dtype or source.dtype,
        tokenizer=tokenizer,
        prompts=prompts,
        tokens=tokens,
    )


@dataclass(frozen=True)
class ChatFormat:
    """How questions are rendered, and the text that ends an answer."""

    template: ChatTemplate
    stop: str

    def render(self, question: str) -> str:
        """A question with the header of its answer.

        Raises:
            DataError: the template does not render it.
        """
        return self.render_messages([_question(question)])

    def render_messages(self, messages: Sequence[Message]) -> str:
        """A conversation with the header of its next answer.

        Raises:
            DataError: the template does not render it.
        """
        try:
            return self.template.render(messages, add_generation_prompt=True)
        except TemplateFault as error:
            raise _template_error(self.template, error, "the prompt") from None


def _question(text: str) -> Message:
    return {"role": "user", "content": text}


def chat_format(request: SamplingOptions, source: ModelSource, tokenizer: Tokenizer) -> ChatFormat:
    """The template that the model was trained with, or the one that is asked for.

    Raises:
        DataError: there is none, or it does not render an answer.
    """
    name = request.chat_template
    folder = source.path if source.kind == "hf" else None
    if source.kind == "checkpoint":
        name = name or source.run.data.chat_template
        for data_source in sources_of(source.run.data):
            prepared = prepared_of(data_source)
            folder = prepared.folder if prepared is not None else folder
    try:
        template = find_template(name, tokenizer, folder=folder)
    except DataError as error:
        raise DataError(*map(_of_this_command, error.faults)) from None
    example = [_question(EXAMPLE), {"role": ASSISTANT, "content": EXAMPLE_ANSWER}]
    try:
        rendered = template.render_answers(example)
        if template.render([_question(EXAMPLE)]) == template.render([_question(EXAMPLE_ANSWER)]):
            raise TemplateFault("it leaves out messages of the role 'user'")
    except TemplateFault as error:
        raise _template_error(template, error, "an example") from None
    (start, stop) = rendered.answers[-1] if rendered.answers else (0, 0)
    _, _, end = rendered.text[start:stop].partition(EXAMPLE_ANSWER)
    return ChatFormat(template, end.strip())


def _template_error(template: ChatTemplate, fault: TemplateFault, where: str) -> DataError:
    return DataError(*map(_of_this_command, template_fault(template, fault, where).faults))


def _of_this_command(fault: Fault) -> Fault:
    """A fault of the template that names the option of this command in place of the run's key."""
    if fault.key != TEMPLATE_KEY:
        return fault
    fix = fault.fix.replace(f"--{TEMPLATE_KEY}", "--chat_template")
    return replace(fault, key="chat_template", fix=fix)


def inference_model(model: ModelSection) -> ModelSection:
    """The model without blocks that only training computes: multi-token prediction."""
    if model.reads_later_targets:
        return model.model_copy(update={"mtp_depth": 0})
    return model


def mesh_faults(mesh: Mesh, config: ModelSection) -> Iterator[Fault]:
    """Axes that generation does not support, and sizes of the model that the mesh does not divide."""
    yield from _axis_faults(mesh)
    yield from layout.axes_divide(mesh, config)
    for fault in layout.dimension_faults(mesh, config, ParallelConfig(), mesh_axis=EP):
        yield replace(fault, fix="give its ranks to tp")
    yield from layout.layers_make_stages(mesh, config, PipelineConfig(), seq_len=1)


def _axis_faults(mesh: Mesh) -> Iterator[Fault]:
    supported = [f"{name}{size}" for name, size in mesh.axes if name in SUPPORTED_AXES]
    for name, size in mesh.axes:
        if name in SUPPORTED_AXES or size == 1:
            continue
        if supported:
            fix = f"--mesh {' '.join(supported)} or"
        else:
            fix = "leave it out, or"
        yield Fault(
            "mesh",
            UNSUPPORTED_AXES[name],
            got=mesh.text,
            need="pp, ep and tp alone",
            fix=f"{fix} give its ranks to tp",
        )


def open_model_tokenizer(request: SamplingOptions, source: ModelSource) -> Tokenizer:
    """The tokenizer that is asked for, or the model's own.

    Raises:
        ConfigError: it is unknown, or cannot be read; or the model generates no text.
    """
    if getattr(source.run.model, "labels", 0):
        what = "scores texts and generates none"
        raise ConfigError(Fault(str(source.path), what, fix="another model, or the command eval"))
    try:
        if request.tokenizer:
            return open_tokenizer(request.tokenizer)
        return source.tokenizer()
    except UserError as error:
        fix = "--tokenizer FILE, its tokenizer.json, or bytes"
        faults = [replace(fault, key="tokenizer", fix=fault.fix or fix) for fault in error.faults]
        raise ConfigError(*faults) from None


def encode_prompt(prompt: str, tokenizer: Tokenizer, *, vocab: int) -> tuple[int, ...]:
    """The tokens of a prompt; an empty one begins a document, where the tokenizer has a token
    between documents.
    """
    tokens = tuple(tokenizer.encode(prompt))
    if not tokens and tokenizer.end is None:
        what = f"is empty, and the tokenizer {tokenizer.name} has no token that begins a document"
        raise ConfigError(
            Fault("prompt", what, need="one token at least", fix='for example --prompt "def "')
        )
    tokens = tokens or (tokenizer.end or 0,)
    if max(tokens) >= vocab:
        what = f"has token {max(tokens)} of the tokenizer {tokenizer.name}, which the model does not know"
        raise ConfigError(
            Fault(
                "prompt",
                what,
                need=f"tokens below {vocab}",
                fix="--tokenizer FILE, the model's own",
            )
        )
    return tokens


def _length_faults(tokens: tuple[int, ...], config: ModelConfig) -> Iterator[Fault]:
    limit = max_positions(config)
    if limit is not None and len(tokens) >= limit:
        yield Fault(
            "prompt",
            "leaves no position for another token",
            got=counted(len(tokens), "token"),
            need=f"fewer than the model's {counted(limit, 'position')}",
            fix="shorten it",
        )


def max_positions(config: ModelConfig) -> int | None:
    """Positions that a model has learned; None: it computes any number."""
    named = (getattr(config, name, None) for name in CONTEXT_FIELDS)
    contexts = [longest for longest in named if isinstance(longest, int)]
    learned = [longest for longest in contexts if config.check_seq_len(longest + 1) is not None]
    return min(learned, default=None)
