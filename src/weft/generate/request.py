"""Options of `weft generate`, checked against the stored model: prompts, mesh, tokenizer. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from weft.config import validate
from weft.config.schema import ConfigSection, ModelSection, ParallelConfig, PipelineConfig
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
from weft.data.prepared import prepared_of, sources_of
from weft.data.tokenizer import Tokenizer, open_tokenizer
from weft.errors import ConfigError, Fault, UserError, counted
from weft.generate.model_source import ModelSource
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.parallel.cp import AXIS as CP
from weft.parallel.dp import AXIS as DP
from weft.parallel.ep import AXIS as EP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.small_files import MIB, UnreadableFile, parse_json, read_text

LINES = ".jsonl"
EXAMPLE, EXAMPLE_ANSWER = "question", "answer"
"""Texts by which the end of an answer is found in what a template renders."""
MAX_PROMPT_BYTES = 16 * MIB
"""Size of the largest file of prompts."""

SUPPORTED_AXES = (PP, EP, TP)
UNSUPPORTED_AXES = {
    DP: "dp would generate the same texts again: one call takes any number of --samples",
    CP: "cp shards long sequences, and the cache of keys and values is sharded over the heads by tp",
}


class Request(ConfigSection):
    """What to generate, how, and where."""

    prompt: str = Field("", description="text to continue; nothing: a new document")
    prompt_file: str = Field(
        "", description=f"file with the prompt, or {LINES} with one on each line"
    )
    tokens: int = Field(200, ge=1, le=2**24, description="most tokens of each text")
    samples: int = Field(1, ge=1, le=2**16, description="texts for each prompt")
    stop: str = Field("", description="text before which a text ends; nothing: none")
    temperature: float = Field(
        0.8,
        ge=0,
        description="0: the likeliest token; higher: more random",
    )
    top_k: Annotated[int, Field(ge=1)] | None = Field(
        None, description="sample from so many likeliest tokens; None: all"
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample from the likeliest tokens of this probability together",
    )
    seed: int = Field(
        1,
        ge=0,
        lt=2**63,
        description="of the sampling; sample and position are mixed in",
    )
    mesh: str = Field("", description='any of pp, ep, tp: "tp2", "pp2 tp2"; nothing: one rank')
    dtype: Dtype | None = Field(
        None, description="number type; None: as the run computes, or as the folder stores"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where ranks compute")
    transport: Literal["process", "threads"] = Field(
        "process", description="what a rank is on this machine"
    )
    tokenizer: str = Field("", description="bytes or a tokenizer.json; nothing: the model's own")
    chat: bool = Field(
        False, description="prompts are questions of a user, rendered by the chat template"
    )
    chat_template: str | None = Field(
        None,
        description="chatml, alpaca, or a Jinja file; None: the one the model was trained with",
    )
    format: Literal["text", "json"] = Field(
        "text", description="json: one object for each text; --json for short"
    )

    @property
    def device_mesh(self) -> Mesh:
        """The mesh, parsed."""
        return Mesh.parse(self.mesh)


def expand_json_flag(words: list[str]) -> list[str]:
    """Command-line words with `--json` written as `--format json`, and `--chat` as `--chat True`."""
    expanded: list[str] = []
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else "--"
        if word == "--json":
            expanded.extend(("--format", "json"))
        elif word == "--chat" and following.startswith("--"):
            expanded.extend(("--chat", "True"))
        else:
            expanded.append(word)
    return expanded


def read_prompts(request: Request) -> tuple[str, ...]:
    """The prompts, one at least.

    Raises:
        ConfigError: two places that name them, or a file that cannot be read.
    """
    if not request.prompt_file:
        return (request.prompt,)
    if request.prompt:
        raise ConfigError(
            Fault(
                "prompt_file",
                "is given together with --prompt",
                fix="give one of --prompt and --prompt_file",
            )
        )
    path = Path(request.prompt_file)
    try:
        text = read_text(path, max_bytes=MAX_PROMPT_BYTES)
    except UnreadableFile as error:
        why = error.got or error.what
        raise ConfigError(
            Fault(
                "prompt_file",
                "cannot be read",
                f"{str(path)!r}: {why}",
                "a text file",
            )
        ) from None
    if path.suffix != LINES:
        return (text,)
    prompts = tuple(_parse_lines(path, text))
    if not prompts:
        raise ConfigError(
            Fault(
                "prompt_file",
                "has no line",
                repr(str(path)),
                "a prompt on each",
            )
        )
    return prompts


def _parse_lines(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        value = _json_or_none(line)
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            need = 'JSON: "text", or {"prompt": "text"}'
            raise ConfigError(
                Fault(
                    "prompt_file",
                    f"line {number} of {path} is no prompt",
                    repr(line[:40]),
                    need,
                )
            )
        yield prompt


def _json_or_none(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


@dataclass(frozen=True)
class GenerationJob:
    """A checked request, as every rank gets it.

    Attributes:
        config: the model without what only training reads.
        dtype: in which it computes.
        prompts: their text.
        tokens: their tokens.
    """

    request: Request
    source: ModelSource
    config: ModelSection
    dtype: Dtype
    tokenizer: Tokenizer
    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

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
        """The layout."""
        mesh = self.request.device_mesh
        return Plan(
            mesh=mesh,
            family=self.config.name,
            architecture=canonical_json(self.config.architecture),
            stages=make_stages(self.config.block_specs(1), mesh.degree(PP)),
            params=self.dtype,
            compute=self.dtype,
            reduce=self.dtype,
        )

    def notes(self) -> Iterator[str]:
        """Remarks on the job that are no faults."""
        yield from self.source.notes
        longest = max(len(tokens) for tokens in self.tokens)
        if self.max_positions is not None and longest + self.request.tokens > self.max_positions:
            what = f"a prompt of {counted(longest, 'token')} and {self.request.tokens} more"
            yield f"{what} pass the model's {self.max_positions} positions: texts end there"


def make_job(
    request: Request, source: ModelSource, other_faults: Iterable[Fault] = ()
) -> GenerationJob:
    """The job, every part of it checked.

    Args:
        other_faults: of the environment, reported with those found here.

    Raises:
        UserError: with every fault of mesh, prompts and environment.
    """
    config = _without_training_blocks(source.run.model)
    faults = [*_mesh_faults(request.device_mesh, config), *other_faults]
    vocab = config.axis_sizes()["vocab"]
    try:
        tokenizer = _tokenizer_of(request, source)
        prompts = read_prompts(request)
        texts = prompts
        if request.chat:
            chat = _chat_format(request, source, tokenizer)
            texts = tuple(map(chat.render, prompts))
            request = request.model_copy(update={"stop": request.stop or chat.stop})
        tokens = tuple(_encode(text, tokenizer, vocab=vocab) for text in texts)
    except UserError as error:
        raise UserError(*faults, *error.faults) from None
    for prompt_tokens in tokens:
        faults.extend(_length_faults(prompt_tokens, config))
    if faults:
        raise UserError(*dict.fromkeys(faults))
    return GenerationJob(
        request,
        source,
        config,
        request.dtype or source.dtype,
        tokenizer,
        prompts,
        tokens,
    )


@dataclass(frozen=True)
class _ChatFormat:
    """How questions are rendered, and the text that ends an answer."""

    template: ChatTemplate
    stop: str

    def render(self, question: str) -> str:
        """A question with the header of its answer.

        Raises:
            DataError: the template does not render it.
        """
        try:
            return self.template.render([_question(question)], add_generation_prompt=True)
        except TemplateFault as error:
            raise template_fault(self.template, error, "the prompt") from None


def _question(text: str) -> Message:
    return {"role": "user", "content": text}


def _chat_format(request: Request, source: ModelSource, tokenizer: Tokenizer) -> _ChatFormat:
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
    template = find_template(name, tokenizer, folder=folder)
    example = [_question(EXAMPLE), {"role": ASSISTANT, "content": EXAMPLE_ANSWER}]
    try:
        rendered = template.render_answers(example)
    except TemplateFault as error:
        raise template_fault(template, error, "an example") from None
    (start, stop) = rendered.answers[-1] if rendered.answers else (0, 0)
    _, _, end = rendered.text[start:stop].partition(EXAMPLE_ANSWER)
    return _ChatFormat(template, end.strip())


def _without_training_blocks(model: ModelSection) -> ModelSection:
    """The model without blocks that only training computes: multi-token prediction."""
    if model.reads_later_targets:
        return model.model_copy(update={"mtp_depth": 0})
    return model


def _mesh_faults(mesh: Mesh, config: ModelSection) -> Iterator[Fault]:
    """Axes that generation does not support, and sizes of the model that the mesh does not divide."""
    yield from _axis_faults(mesh)
    yield from validate.axes_divide(mesh, config)
    for fault in validate.dimension_faults(mesh, config, ParallelConfig(), mesh_axis=EP):
        yield replace(fault, fix="give its ranks to tp")
    yield from validate.layers_make_stages(mesh, config, PipelineConfig(), seq_len=1)


def _axis_faults(mesh: Mesh) -> Iterator[Fault]:
    supported = [f"{name}{size}" for name, size in mesh.axes if name in SUPPORTED_AXES]
    for name, size in mesh.axes:
        if name in SUPPORTED_AXES or size == 1:
            continue
        fix = f"--mesh {' '.join(supported)} or" if supported else "leave it out, or"
        yield Fault(
            "mesh",
            UNSUPPORTED_AXES[name],
            got=mesh.text,
            need="pp, ep and tp alone",
            fix=f"{fix} give its ranks to tp",
        )


def _tokenizer_of(request: Request, source: ModelSource) -> Tokenizer:
    try:
        return open_tokenizer(request.tokenizer) if request.tokenizer else source.tokenizer()
    except UserError as error:
        fix = "--tokenizer FILE, its tokenizer.json, or bytes"
        faults = [
            replace(
                fault,
                key="tokenizer",
                fix=fault.fix or fix,
            )
            for fault in error.faults
        ]
        raise ConfigError(*faults) from None


def _encode(prompt: str, tokenizer: Tokenizer, *, vocab: int) -> tuple[int, ...]:
    """The tokens of a prompt; an empty one begins a document, where the tokenizer has a token
    between documents.
    """
    tokens = tuple(tokenizer.encode(prompt))
    if not tokens and tokenizer.end is None:
        what = f"is empty, and the tokenizer {tokenizer.name} has no token that begins a document"
        raise ConfigError(
            Fault(
                "prompt",
                what,
                need="one token at least",
                fix='for example --prompt "def "',
            )
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
    longest: int | None = getattr(config, "max_seq_len", None)
    if longest is None or config.check_seq_len(longest + 1) is None:
        return None
    return longest
