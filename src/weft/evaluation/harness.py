"""Adapter of stored models to lm-evaluation-harness (EleutherAI): log-likelihoods and greedy continuations, on one device.

import lm_eval
from weft.evaluation import HarnessModel

lm_eval.simple_evaluate(HarnessModel("runs/first"), tasks=["lambada_openai"])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.data.tokenizer import Tokenizer
from weft.errors import Fault, UserError
from weft.generate.decode import load_model
from weft.generate.job import max_positions
from weft.generate.main import open_source
from weft.generate.model_source import find_model
from weft.layout.plan import Plan, canonical_json, make_stages
from weft.models.common.batch import chain, token_batch
from weft.train.build import family_of

DEFAULT_LENGTH = 2048
"""Tokens of a window where the model computes any number of positions."""
DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True)
class Window:
    """A part of a text that is scored in one forward.

    Attributes:
        tokens: inputs and targets.
        num_scored: the last so many of them are scored.
    """

    tokens: tuple[int, ...]
    num_scored: int


class HarnessModel:
    """A stored model as lm-evaluation-harness calls it.

    Args:
        model: a run, RUN/best, a checkpoint, or a Hugging Face folder.
        max_length: tokens of a window; None: the positions that the model has learned, or 2,048.

    Raises:
        UserError: the library is not installed, or the model cannot be read.
    """

    rank = 0
    world_size = 1

    def __init__(self, model: str | Path, *, max_length: int | None = None) -> None:
        _register_with_harness(type(self))
        source = find_model(str(model))
        config = source.run.model
        if config.reads_later_targets:
            config = config.model_copy(update={"mtp_depth": 0})
        self.tokenizer: Tokenizer = source.tokenizer()
        self.max_length = max_length or max_positions(config) or DEFAULT_LENGTH
        self.end_tokens = source.end_tokens
        if self.tokenizer.end is not None:
            self.end_tokens |= {self.tokenizer.end}
        self._vocab = config.axis_sizes()["vocab"]
        plan = Plan(
            mesh=Mesh.parse(""),
            family=config.name,
            architecture=canonical_json(config.architecture),
            stages=make_stages(config.block_specs(1), 1),
            params=source.dtype,
            compute=source.dtype,
            reduce=source.dtype,
        )
        world = ThreadWorld(1)
        self._comm = Comm(plan.mesh, 0, world.transport(0))
        self._model = load_model(
            family_of(config, source.run.lora),
            config,
            open_source(source),
            plan=plan,
            comm=self._comm,
        )

    @property
    def tokenizer_name(self) -> str:
        """Path of the tokenizer, for the harness's cache keys."""
        return self.tokenizer.name

    @property
    def prefix_token(self) -> int:
        """The token that a text without context is scored after: the end of a document, or 0."""
        return self.tokenizer.end or 0

    def set_cache_hook(self, cache_hook: object) -> None:
        """Accept the harness's cache; every request is computed."""

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """For each (context, continuation): the log-likelihood of the continuation, nats, and whether
        it is the greedy one.
        """
        return [self._score_pair(*request.args) for request in requests]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """For each (text,): its log-likelihood, nats; each token is scored once, after as many before
        it as fit.
        """
        results = []
        for request in requests:
            (text,) = request.args
            windows = rolling_windows(
                self.tokenizer.encode(text), prefix=self.prefix_token, length=self.max_length
            )
            results.append(sum(self._score(window)[0] for window in windows))
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """For each (context, options): the greedy continuation up to the first of the texts in
        `until`, or `max_gen_toks` tokens.

        Raises:
            UserError: the options ask for sampling.
        """
        return [self._continue(*request.args) for request in requests]

    def _score_pair(self, context: str, continuation: str) -> tuple[float, bool]:
        num_spaces = len(context) - len(context.rstrip())
        if num_spaces:  # the space before a word belongs to the word's token
            continuation = context[-num_spaces:] + continuation
            context = context[:-num_spaces]
        if context:
            tokens = list(self.tokenizer.encode(context + continuation))
            num_context = len(self.tokenizer.encode(context))
        else:
            tokens = [self.prefix_token, *self.tokenizer.encode(continuation)]
            num_context = 1
        num_scored = len(tokens) - num_context
        kept = tokens[-(self.max_length + 1) :]
        window = Window(tokens=tuple(kept), num_scored=min(num_scored, len(kept) - 1))
        return self._score(window)

    def _score(self, window: Window) -> tuple[float, bool]:
        """Log-likelihood of the scored tokens, and whether each is the likeliest."""
        count = window.num_scored
        if count <= 0:
            return 0.0, True
        inputs = window.tokens[:-1]
        targets = window.tokens[-count:]
        logits_SV = self._logits(inputs)[-count:]
        logprobs_SV = logits_SV.log_softmax(-1)
        targets_S = torch.tensor(targets, device=logits_SV.device)
        chosen_S = logprobs_SV.gather(-1, targets_S.unsqueeze(-1)).squeeze(-1)
        likeliest_S = logits_SV.argmax(-1)
        is_greedy = bool((likeliest_S == targets_S).all())
        return float(chosen_S.sum()), is_greedy

    def _continue(self, context: str, options: dict[str, Any]) -> str:
        """The likeliest text after a context, up to the first stop text."""
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            what = "the adapter generates the likeliest tokens alone"
            fix = "set do_sample to false in the task"
            raise UserError(Fault("generate_until", what, got="do_sample", fix=fix))
        stops = _stop_texts(options.get("until"))
        most = int(options.get("max_gen_toks", DEFAULT_NEW_TOKENS))
        tokens = list(self.tokenizer.encode(context)) or [self.prefix_token]
        new: list[int] = []
        text = ""
        while len(new) < most:
            window = tokens[-self.max_length :]
            logits_SV = self._logits(tuple(window))
            token = int(logits_SV[-1].argmax())
            if token in self.end_tokens:
                break
            tokens.append(token)
            new.append(token)
            text = self.tokenizer.decode(new)
            places = [text.index(stop) for stop in stops if stop in text]
            if places:
                return text[: min(places)]
        return text

    @torch.no_grad()
    def _logits(self, tokens: tuple[int, ...]) -> Tensor:
        """logits_SV after each token, float32 at least."""
        tokens_BS = torch.tensor([tokens], device=self._comm.device)
        batch = token_batch(tokens_BS, tokens_BS)
        blocks = dict(self._model.blocks.items())
        blocks.pop("loss", None)
        logits_BSV = chain(blocks, batch.inputs, batch).x
        dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
        return logits_BSV[0].to(dtype)


def _stop_texts(until: str | Sequence[str] | None) -> list[str]:
    """The texts that end a continuation: one or several; empty ones end nothing."""
    texts = [until] if isinstance(until, str) else list(until or ())
    return [text for text in texts if text]


def rolling_windows(tokens: Sequence[int], *, prefix: int, length: int) -> list[Window]:
    """Windows of at most `length` inputs that score every token once; later windows begin with tokens
    that the one before has scored.
    """
    if not tokens:
        return []
    first = tuple(tokens[:length])
    windows = [Window((prefix, *first), len(first))]
    done = len(first)
    while done < len(tokens):
        stop = min(done + length, len(tokens))
        start = stop - length - 1
        window = Window(tokens=tuple(tokens[start:stop]), num_scored=stop - done)
        windows.append(window)
        done = stop
    return windows


def _register_with_harness(model_type: type) -> None:
    """Make the harness accept a class as one of its models.

    Raises:
        UserError: the library is not installed.
    """
    try:
        from lm_eval.api.model import LM  # type: ignore[import-not-found]  # an extra
    except ImportError:
        what = "the library lm_eval is not installed"
        fix = "pip install 'weft-train[eval-harness]'"
        raise UserError(Fault("lm-evaluation-harness", what, fix=fix)) from None
    LM.register(model_type)
