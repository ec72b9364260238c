"""Compares weft's models with Hugging Face's: the same weights give the same logits and gradients, in float64.

Tolerances are relative to the largest entry of each tensor.

EXACT = 1e-10: what is asked of two float64 programs. Rounding is 1e-16 an operation, sums have some
1e3 terms, and a gradient passes some 1e2 operations, so 1e-12 would be no surprise; 0 to 2e-15 is
what comes out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.model_config import ModelConfig
from weft.models import family
from weft.models.common.batch import IGNORE, Batch, forward, token_batch
from weft.models.common.init import named_parameters, tie

EXACT = 1e-10
NUM, SEQ = 2, 48

Views = dict[str, Tensor]
"""Our parameter name -> the part of Hugging Face's tensor that holds it, as a view: it may be read
and written.
"""

ViewsOf = Callable[[dict[str, Tensor], ModelConfig], Views]


def compare(cfg: ModelConfig, theirs: nn.Module, *, views: ViewsOf, tolerance: float) -> None:
    """Logits and every gradient with their weights copied here; then the logits with our weights
    copied there.
    """
    theirs = shaken(theirs.double())
    blocks = our_blocks(cfg)
    ours = named_parameters(blocks)
    batch = make_batch(cfg.axis_sizes()["vocab"])

    copy_into(ours, views(tensors_of(theirs), cfg))
    logits = _their_logits(theirs, batch.inputs)
    near(_our_logits(blocks, batch), logits, "logits", tolerance)

    loss = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    our_loss = forward(blocks, batch)
    near(our_loss, loss, "loss", tolerance)
    loss.backward()
    our_loss.backward()
    compare_gradients(ours, views(gradients_of(theirs), cfg), tolerance)

    shaken(nn.ModuleDict(blocks))
    copy_into(views(tensors_of(theirs), cfg), ours)
    assert not torch.equal(logits, _their_logits(theirs, batch.inputs)), "the weights were shaken"
    near(
        _our_logits(blocks, batch),
        _their_logits(theirs, batch.inputs),
        "logits with our weights",
        tolerance,
    )


def compare_gradients(ours: dict[str, nn.Parameter], theirs: Views, tolerance: float) -> None:
    """Every parameter that is trained has Hugging Face's gradient."""
    trained = {name for name, parameter in ours.items() if parameter.requires_grad}
    assert set(theirs) == trained
    for name, gradient in theirs.items():
        # a bias of all keys shifts all scores of a query alike: its gradient is 0, and what is seen of it is rounding
        scale = theirs[name.replace("attn.k.bias", "attn.v.bias")]
        near(ours[name].grad, gradient, f"gradient of {name}", tolerance, scale=scale)


def our_blocks(cfg: ModelConfig) -> dict[str, nn.Module]:
    """Our model in float64, tied."""
    blocks = family(cfg.family).blocks(cfg)
    for block in blocks.values():
        block.double()
    tie(blocks, family(cfg.family).ties(cfg))
    return blocks


def shaken(model: nn.Module) -> nn.Module:
    """Every weight, norms and biases too, moved far enough from its special start that a mix-up
    shows.
    """
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not name.endswith("inv_freq"):
                tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def make_batch(vocab: int) -> Batch:
    """Random tokens; some targets do not count."""
    tokens = torch.randint(vocab, (NUM, SEQ + 1))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = IGNORE
    return token_batch(tokens[:, :-1], targets)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {
        name: tensor.data for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def copy_into(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Values by name."""
    assert set(source) == set(target)
    with torch.no_grad():
        for name, tensor in target.items():
            assert tensor.shape == source[name].shape, name
            tensor.copy_(source[name])


def near(
    ours: Tensor, theirs: Tensor, what: str, tolerance: float, *, scale: Tensor | None = None
) -> None:
    """Equal to within `tolerance` of the largest entry."""
    reference = theirs if scale is None else scale
    largest_error = (ours - theirs).abs().max()
    error = (largest_error / reference.abs().max()).item()
    assert error <= tolerance, f"{what}: off by {error:.2g} of its largest entry"


def _our_logits(blocks: dict[str, nn.Module], batch: Batch) -> Tensor:
    without_loss = {name: block for name, block in blocks.items() if name != "loss"}
    return forward(without_loss, batch)


def _their_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits
