"""Owns what a person asks of `weft generate`: the keys, and the prompts that they name. Pure: no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from weft.config.schema import ConfigSection
from weft.core.mesh import Mesh
from weft.core.precision import Dtype
from weft.errors import ConfigError, Fault

LINES = ".jsonl"


class Request(ConfigSection):
    """What to write, how, and where."""

    prompt: str = Field("", description="text to go on from; nothing: a new document")
    prompt_file: str = Field("", description=f"file with the prompt, or {LINES} with one on each line")
    tokens: int = Field(200, ge=1, le=2**24, description="most tokens of each text")
    samples: int = Field(1, ge=1, le=2**16, description="texts for each prompt")
    stop: str = Field("", description="text before which a text ends; nothing: none")
    temperature: float = Field(0.8, ge=0, description="0: the likeliest token; higher: bolder")
    top_k: Annotated[int, Field(ge=1)] | None = Field(None, description="draw from so many likeliest tokens; None: all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens of this probability together")
    seed: int = Field(1, ge=0, lt=2**63, description="of the draws; sample and position are mixed in")
    mesh: str = Field("", description='any of pp, ep, tp: "tp2", "pp2 tp2"; nothing: one rank')
    dtype: Dtype | None = Field(None, description="number type; None: as the run computes, or as the folder stores")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where ranks compute")
    transport: Literal["process", "threads"] = Field("process", description="what a rank is on this machine")
    tokenizer: str = Field("", description="bytes or a tokenizer.json; nothing: the model's own")
    format: Literal["text", "json"] = Field("text", description="json: one object for each text; --json for short")

    @property
    def grid(self) -> Mesh:
        """The mesh, read from its text."""
        return Mesh.parse(self.mesh)


def short_words(words: list[str]) -> list[str]:
    """`--json` in full."""
    return [part for word in words for part in (("--format", "json") if word == "--json" else (word,))]


def read_prompts(request: Request) -> tuple[str, ...]:
    """The prompts, one at least.

    Raises:
        ConfigError: two places that name them, or a file that cannot be read.
    """
    if not request.prompt_file:
        return (request.prompt,)
    if request.prompt:
        raise ConfigError(Fault("prompt_file", "beside a prompt", fix="give one of --prompt and --prompt_file"))
    path = Path(request.prompt_file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(Fault("prompt_file", "cannot be read", f"{str(path)!r}: {why}", "a text file")) from None
    prompts = tuple(_lines(path, text)) if path.suffix == LINES else (text,)
    if not prompts:
        raise ConfigError(Fault("prompt_file", "has no line", repr(str(path)), "a prompt on each"))
    return prompts


def _lines(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            need = 'JSON: "text", or {"prompt": "text"}'
            raise ConfigError(Fault("prompt_file", f"line {number} of {path} is no prompt", repr(line[:40]), need))
        yield prompt
