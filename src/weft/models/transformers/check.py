"""Whether the chain of blocks computes what transformers' own model does: logits of a few tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.hf.architectures import KEY
from weft.errors import Fault, PlanError, type_and_message
from weft.models.common.batch import Batch, forward, token_batch
from weft.models.transformers.adapt import adapt
from weft.models.transformers.build import Architecture, architecture_of
from weft.models.transformers.capture import OTHER, token_scores
from weft.models.transformers.chain import blocks_of_model
from weft.models.transformers.interfaces import EAGER
from weft.models.transformers.sizes import SIZES
from weft.models.transformers.wide_constants import WideConstants

MOST_ENTRIES = 2**22
"""Entries of models that are compared themselves; larger ones in tiny sizes, with their settings."""
MOST_LAYERS = 4
ROWS, LENGTH = 2, 12
FIRST = 5
"""Tokens of the first of two documents."""
SEED = 0
NOISE = 0.02
"""Added to initial values: what starts at zero would hide what it is multiplied with."""
TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest: transformers casts to float32 inside, which
explains 1e-6; two positions that are exchanged show 1e-2 and more.
"""


def check_against_transformers(
    model_type: str, values: Mapping[str, Any], *, packs_documents: bool
) -> str:
    """Reject an architecture whose chain computes other logits; a note where it could not be told.

    Args:
        packs_documents: whether sequences hold several documents: each must be computed by itself.

    Raises:
        PlanError: with the difference.
    """
    found = architecture_of(model_type, values)
    if sum(map(math.prod, found.shapes.values())) > MOST_ENTRIES:
        tiny = {name: size.tiny for name, size in SIZES.items() if name in values}
        tiny["layers"] = min(values["layers"], MOST_LAYERS)
        try:
            found = architecture_of(model_type, {**values, **tiny})
        except PlanError as error:
            return f"not compared with transformers in tiny sizes: {error.faults[0].what}"
    _compare(found, packs_documents=packs_documents)
    return ""


def _compare(found: Architecture, *, packs_documents: bool) -> None:
    vocab = int(found.config.vocab_size)
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocab, (ROWS, LENGTH), generator=generator)
    batch = token_batch(ids, ids)
    with torch.no_grad():
        right, dtype = _expected(found, batch)
        try:
            own = adapt(_filled(found, found.captured.implementation, dtype))
            blocks = blocks_of_model(own, found.captured)
            logits = forward(blocks, batch)
        except Exception as error:
            what = f"its parts do not run by themselves: {type_and_message(error)}"
            raise PlanError(Fault(KEY, what, fix=OTHER)) from error
    difference = float((logits - right).abs().max() / right.abs().max())
    if not difference <= TOLERANCE:
        what = "its layers one by one compute other logits than the whole model"
        got = f"{difference:.1e} of the largest logit"
        raise PlanError(Fault(KEY, what, got=got, need=f"at most {TOLERANCE:.0e}", fix=OTHER))
    if packs_documents:
        _check_documents(blocks, batch, TOLERANCE * float(right.abs().max()))


def _expected(found: Architecture, batch: Batch) -> tuple[Tensor, torch.dtype]:
    """The logits of transformers' own model, in float64, or in float32 where its code asks for that.

    Raises:
        PlanError: it does not run in either.
    """
    errors: list[Exception] = []
    for dtype in (torch.float64, torch.float32):
        types = WideConstants() if dtype == torch.float64 else nullcontext()
        try:
            with types:
                lm = _filled(found, EAGER, dtype)
                return _logits(lm, batch, is_scored=found.labels > 0), dtype
        except Exception as error:  # noqa: BLE001 - the first one is raised below
            errors.append(error)
    what = f"transformers' own forward fails: {type_and_message(errors[0])}"
    raise PlanError(Fault(KEY, what, fix=OTHER)) from errors[0]


@torch.no_grad()
def _check_documents(blocks: Mapping[str, nn.Module], batch: Batch, tolerance: float) -> None:
    """Reject layers that read other documents by code of their own: short convolutions, recurrent states.

    Raises:
        PlanError: of a second document in a sequence other logits than of it alone.
    """
    place = torch.arange(LENGTH).expand(ROWS, LENGTH)
    is_second = place >= FIRST
    two = replace(batch, documents=is_second.long(), positions=place - FIRST * is_second)
    second = batch.inputs[:, FIRST:]
    packed, alone = forward(blocks, two)[:, FIRST:], forward(blocks, token_batch(second, second))
    difference = float((packed - alone).abs().max())
    if not difference <= tolerance:
        what = "its layers read the tokens of other documents"
        got = f"logits {difference:.1e} off"
        fix = "--data.packing stream, or single for records"
        raise PlanError(Fault("data.packing", what, got=got, fix=fix))


def _filled(found: Architecture, implementation: str, dtype: torch.dtype) -> nn.Module:
    """The model with the same values for each implementation."""
    with torch.device("cpu"), torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        lm = found.build(implementation).to(dtype)
        stored = lm.state_dict(keep_vars=True).values()
        for x in {id(x): x for x in stored if x.is_floating_point()}.values():
            x.add_(torch.randn_like(x), alpha=NOISE)
    return lm.eval()  # without dropout, which transformers draws in another way


def _logits(lm: nn.Module, batch: Batch, *, is_scored: bool) -> Tensor:
    if is_scored:
        return token_scores(lm, input_ids=batch.inputs, use_cache=False)
    logits: Tensor = lm(input_ids=batch.inputs, use_cache=False).logits
    return logits
