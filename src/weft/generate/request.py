"""Options of `weft generate` and `weft chat`, and the prompts that they name. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from weft.config.command_options import JsonOptions
from weft.core.mesh import Mesh
from weft.core.precision import Dtype
from weft.core.transports import TransportName
from weft.errors import ConfigError, Fault
from weft.small_files import MIB, UnreadableFile, parse_json, read_text

LINES = ".jsonl"
MAX_PROMPT_BYTES = 16 * MIB
"""Size of the largest file of prompts."""


class SamplingOptions(JsonOptions):
    """How tokens are sampled, and where: the options that `weft generate` and `weft chat` share."""

    temperature: float = Field(0.8, ge=0, description="0: the likeliest token; higher: more random")
    top_k: Annotated[int, Field(ge=1)] | None = Field(
        None, description="sample from so many likeliest tokens; None: all"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the likeliest tokens of this probability together"
    )
    seed: int = Field(
        1, ge=0, lt=2**63, description="seed of the sampling; sample and position are mixed in"
    )
    mesh: str = Field("", description='any of pp, ep, tp: "tp2", "pp2 tp2"; nothing: one rank')
    dtype: Dtype | None = Field(
        None, description="number type; None: as the run computes, or as the folder stores"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where ranks compute")
    tokenizer: str = Field("", description="bytes or a tokenizer.json; nothing: the model's own")
    chat_template: str | None = Field(
        None,
        description="chatml, alpaca, or a Jinja file; None: the one the model was trained with",
    )

    @property
    def device_mesh(self) -> Mesh:
        """The mesh, parsed."""
        return Mesh.parse(self.mesh)


class Request(SamplingOptions):
    """What to generate, how, and where."""

    prompt: str = Field("", description="text to continue; nothing: a new document")
    prompt_file: str = Field(
        "", description=f"file with the prompt, or {LINES} with one on each line"
    )
    tokens: int = Field(200, ge=1, le=2**24, description="most tokens of each text")
    samples: int = Field(1, ge=1, le=2**16, description="texts for each prompt")
    stop: str = Field("", description="text before which a text ends; nothing: none")
    transport: TransportName = Field("process", description="what a rank is on this machine")
    chat: bool = Field(
        False, description="prompts are questions of a user, rendered by the chat template"
    )


class ChatRequest(SamplingOptions):
    """What to say to the model first, how long its answers are, and how it samples them."""

    system: str = Field("", description="system prompt of the conversation; nothing: none")
    tokens: int = Field(512, ge=1, le=2**24, description="most tokens of each answer")
    context: Annotated[int, Field(ge=1)] | None = Field(
        None, description="most tokens of a conversation; None: the model's max_seq_len"
    )


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
                got=f"{str(path)!r}: {why}",
                need="a text file",
                fix="check the path",
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
                got=repr(str(path)),
                need="a prompt on each",
                fix="write a prompt into it",
            )
        )
    return prompts


def _parse_lines(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        value = _json_or_none(line)
        if isinstance(value, dict):
            prompt = value.get("prompt")
        else:
            prompt = value
        if not isinstance(prompt, str):
            need = 'JSON: "text", or {"prompt": "text"}'
            raise ConfigError(
                Fault(
                    "prompt_file",
                    f"line {number} of {path} is no prompt",
                    got=repr(line[:40]),
                    need=need,
                    fix="repair or remove the line",
                )
            )
        yield prompt


def _json_or_none(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None
