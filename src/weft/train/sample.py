"""Owns sampling from a model as it lies on the ranks: forward through the pipeline, one token at a time, same text everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from weft.core.sequence import home_of
from weft.models.common.batch import Batch, chain, token_batch
from weft.models.common.init import name_seed
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.forward import gather_vocabulary, run_stages

LEFT_OUT = ("loss", "mtp")
"""Blocks (by the beginning of their names) that only training reads."""


def written_with(stage: nn.ModuleDict) -> Mapping[str, nn.Module]:
    """The blocks of a stage that text is written with."""
    return {name: block for name, block in stage.items() if not name.startswith(LEFT_OUT)}


def sample(
    model: ParallelModel, prompt: Sequence[int], *, vocab: int, num_tokens: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield `num_tokens` tokens that continue `prompt`; every rank must iterate, every rank gets the same tokens.

    Each token costs one forward over the last `seq_len` tokens. `temperature` 0 takes the likeliest token.
    """
    tokens = list(prompt) or [0]
    for index in range(num_tokens):
        window = tokens[-model.plan.seq_len :]
        with torch.no_grad():
            logits = _last_logits(model, window, vocab=vocab)
            token = _choose(logits, temperature=temperature, seed=name_seed(f"sample{index}", seed)).to(
                model.comm.device
            )
        last_home = model.plan.table.stage_to_rank[-1]
        tokens.append(int(model.comm.broadcast_(token, "pp", root=last_home).item()))
        yield tokens[-1]


def _last_logits(model: ParallelModel, window: Sequence[int], *, vocab: int) -> Tensor | None:
    """logits_V after the window's last token, on the ranks of the last stage; None elsewhere."""
    comm, plan = model.comm, model.plan.model_copy(update={"micro_size": 1})
    batch = _padded(window, plan.seq_len, comm.device).columns(index=comm.index("cp"), degree=comm.degree("cp"))

    def play(stage: int, x: Tensor) -> Tensor:
        return chain(written_with(model.stages[stage]), x, batch).x

    x = run_stages(model, batch.inputs, play=play, shape_of=plan.boundary_shape)
    if plan.table.stage_to_rank[-1] != comm.index("pp"):
        return None
    owner, place = home_of(len(window) - 1, plan.seq_len, comm.degree("cp"))
    last = comm.broadcast_(x[0, place].contiguous(), "cp", root=owner)
    return gather_vocabulary(last, model, vocab=vocab)


def _padded(window: Sequence[int], seq_len: int, device: torch.device) -> Batch:
    """One sequence of `seq_len`: what stands behind the window cannot be seen by it."""
    row = torch.zeros(1, seq_len, dtype=torch.int64, device=device)
    row[0, : len(window)] = torch.tensor(window, dtype=torch.int64)
    return token_batch(row, torch.zeros_like(row))


def _choose(logits: Tensor | None, *, temperature: float, seed: int) -> Tensor:
    """A token by its probability, drawn on the CPU so that devices do not matter; int64[1], 0 where there are no logits."""
    if logits is None:
        return torch.zeros(1, dtype=torch.int64)
    if temperature <= 0:
        return logits.argmax().reshape(1).cpu()
    probabilities = (logits.double().cpu() / temperature).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))
