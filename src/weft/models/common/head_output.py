"""What a head hands to the loss: logits, or the losses of the targets, computed chunk by chunk of tokens.

Note [Chunked losses]
    Logits of 8,192 tokens and 128,256 entries are 4.2 GB in float32, and log-softmax and gradient
    as much again. A chunk of tokens goes all the way instead:

        x_CD ── W ── logits_CV ── softmax ── losses_C
                                    │
                                    └─ minus 1 at the target = gradient_CV ─┬─ W ── dx_CD
                                                                            └─ x_CD ── + dW_VD

    Where the loss is a sum over targets, the gradients above are formed in the forward, and the
    backward only multiplies them by the gradient of the sum. Nothing is computed twice, but dW is
    held from the forward to the backward: not where several micro-batches are in flight. There,
    and where targets have weights of their own (preference pairs), the backward computes the
    logits of each chunk again, from x and the log of the sum of exponentials.

    dW is added up in float32 at least. Each chunk reads and writes it once, so chunks have at
    least D / 4 tokens: then their logits are at most a quarter of dW, and the matrix products take
    longer than the sums. A GPU multiplies a hundred times as fast as it reads, and its chunks have
    2,048 tokens: sums then take a tenth of the time of the products. `F.linear_cross_entropy` of
    torch 2.13 has no shards of the vocabulary and no losses of targets without computing logits
    twice; older versions of torch do not have it.

    In 16 bits W gets rows of zeros, up to a multiple of 8: the fast kernels of GPUs take such sizes
    alone (GPT-2's 50,257 entries took three times as long). Their bias is -inf, so that their
    probabilities and gradients are zeros.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.models.common.batch import IGNORE, Batch
from weft.models.common.compiler import compile_function

CHUNK_BYTES = 2**26
"""Logits of a chunk in float32, where D / 4 tokens are not more."""
GPU_ROWS = 2048
"""Tokens of a chunk on GPUs at least."""
ROW_UNIT = 8
"""Rows of W in 16 bits are a multiple of this."""
LEAST_CHUNKS = 3
"""Also of few tokens, so that small models are computed by the same steps as large ones."""


@dataclass(frozen=True)
class HeadOutput:
    """Seam: what a head hands to the loss, from its projection and the projection's input: logits."""

    def __call__(self, proj: nn.Module, x_BSD: Tensor, batch: Batch) -> Tensor:
        logits_BSV: Tensor = proj(x_BSD)
        return logits_BSV


LOGITS = HeadOutput()


@dataclass(frozen=True)
class PlainLosses(HeadOutput):
    """Losses of the targets from whole logits: what `ChunkedLosses` must equal."""

    def __call__(self, proj: nn.Module, x_BSD: Tensor, batch: Batch) -> Tensor:
        """-> losses_BS, 0 where a target does not count; in float32 at least."""
        return token_losses(proj(x_BSD), batch.targets)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """losses_BS: -log p of each target, 0 where it does not count; float32, or float64.

    What has the shape of the targets already are such losses.
    """
    if logits.dim() == targets.dim():
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return losses.view(targets.shape)


class WholeVocabulary:
    """All entries of the vocabulary are here; a tensor-parallel subclass holds some of them.

    Attributes:
        lo: the first entry that is here.
    """

    lo = 0

    def most_entries(self, weight_VD: Tensor) -> int:
        """Entries that any rank holds, equal on all of them."""
        return len(weight_VD)

    def num_entries(self, weight_VD: Tensor) -> int:
        """Entries of the whole vocabulary."""
        return len(weight_VD)

    def operands(self, proj: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight of the product that the projection computes."""
        weight: Tensor = proj.weight  # type: ignore[assignment]
        return x, weight

    def largest(self, x: Tensor) -> Tensor:
        """The largest of each entry over all ranks."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum of each entry over all ranks."""
        return x


@runtime_checkable
class HasVocabulary(Protocol):
    """A projection of which each rank holds some entries of the vocabulary."""

    def vocabulary(self) -> WholeVocabulary:
        """The entries of this rank."""
        ...


@dataclass(frozen=True)
class ChunkedLosses(HeadOutput):
    """Losses of the targets without whole logits; see Note [Chunked losses].

    Attributes:
        vocabulary: the entries that are here.
        is_ahead: whether gradients are formed in the forward.
        is_for_gpu: whose chunks tensors on the meta device have; None: those of a CPU.
        is_compiled: whether softmax and gradient of a chunk are compiled, so that each reads the
            logits once.
    """

    vocabulary: WholeVocabulary
    is_ahead: bool
    is_for_gpu: bool | None = None
    is_compiled: bool = False

    def __call__(self, proj: nn.Module, x_BSD: Tensor, batch: Batch) -> Tensor:
        """-> losses_BS, 0 where a target does not count; in float32 at least.

        Raises:
            IndexError: a target that counts is outside the vocabulary (on a CPU; on a GPU a device
                assertion).
        """
        x_BSD, weight = self.vocabulary.operands(proj, x_BSD)
        bias: Tensor | None = proj.bias  # type: ignore[assignment]
        return self.losses(x_BSD, weight, bias, batch.targets)

    def losses(
        self, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_BS: Tensor
    ) -> Tensor:
        """The losses of a product x W^T + b."""
        counted = torch.where(targets_BS == IGNORE, 0, targets_BS)
        check_within(counted, self.vocabulary.num_entries(weight_VD), "a target")
        # in float16 only gradients that are scaled before they are rounded keep their small entries
        is_ahead = self.is_ahead and torch.is_grad_enabled() and x_BSD.dtype != torch.float16
        length = chunk_length(
            targets_BS.numel(),
            vocab=self.vocabulary.most_entries(weight_VD),
            dim=x_BSD.shape[-1],
            on_gpu=x_BSD.is_cuda or (x_BSD.is_meta and bool(self.is_for_gpu)),
        )
        is_compiled = self.is_compiled and torch.is_grad_enabled() and not is_watched(x_BSD)
        chunks = _Chunks(self.vocabulary, length, _CompiledChunk if is_compiled else _TokenChunk)
        losses: Tensor = _ChunkedLosses.apply(  # type: ignore[no-untyped-call]
            x_BSD, weight_VD, bias_V, targets_BS, chunks, is_ahead
        )
        return losses


def is_watched(x: Tensor) -> bool:
    """Whether a tensor has no values, or a mode looks at each operation: nothing is compiled then."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return x.is_meta or bool(modes)


def check_within(entries: Tensor, vocab: int, what: str) -> None:
    """Reject entries that no rank holds, which would count as zeros; torch's own embedding and loss
    reject them, too.
    """
    if entries.is_meta:
        return
    is_within = ((entries >= 0) & (entries < vocab)).all()
    message = f"{what} is outside the vocabulary of {vocab}"
    if entries.is_cuda:
        torch._assert_async(is_within, message)  # no wait for the device
    elif not is_within:
        raise IndexError(message)


def chunk_length(num_tokens: int, *, vocab: int, dim: int, on_gpu: bool = False) -> int:
    """Tokens of a chunk; see Note [Chunked losses].

    >>> chunk_length(8192, vocab=128_256, dim=4096)
    1024
    >>> chunk_length(8192, vocab=128_256, dim=4096, on_gpu=True)
    2048
    >>> chunk_length(16, vocab=256, dim=16)
    6
    """
    of_bytes = CHUNK_BYTES // (4 * vocab)
    least = GPU_ROWS if on_gpu else dim // 4
    most = -(-num_tokens // LEAST_CHUNKS)
    return max(min(max(of_bytes, least), most), 1)


@dataclass
class _Gradients:
    """The gradients of x, W and b, to which chunks are added in order.

    Attributes:
        needs: whether those of x, W and b are needed.
        x: of each chunk.
        weight, bias: sums over chunks, in float32 at least; None before the first one.
    """

    needs: tuple[bool, bool, bool]
    x: list[Tensor] = field(default_factory=list)
    weight: Tensor | None = None
    bias: Tensor | None = None

    def add(self, chunk: _TokenChunk, log_total_C: Tensor, weights_C: Tensor) -> None:
        """Add those of a chunk, whose losses have these weights.

        Weights of rows multiply x and dx, which are smaller than the logits, where they can.
        """
        needs_x, needs_weight, needs_bias = self.needs
        rows_C1: Tensor | None = None
        if chunk.is_whole and not needs_bias:
            rows_C1 = weights_C.unsqueeze(-1)
            d_logits_CV = chunk.unweighted_gradient()
        else:
            d_logits_CV = chunk.logit_gradient(log_total_C, weights_C)
        dtype = d_logits_CV.dtype
        wide = torch.promote_types(dtype, torch.float32)
        if needs_x:
            dx_CD = d_logits_CV @ chunk.weight_VD.to(dtype)
            dx_CD = dx_CD if rows_C1 is None else dx_CD.mul_(rows_C1)
            self.x.append(dx_CD.to(chunk.x_CD.dtype))
        if needs_weight:
            x_CD = chunk.x_CD.to(dtype)
            x_CD = x_CD if rows_C1 is None else x_CD * rows_C1.to(dtype)
            self.weight = _add_product(self.weight, d_logits_CV.t(), x_CD, wide)
        if needs_bias:
            d_bias = d_logits_CV.sum(0, dtype=wide)
            self.bias = d_bias if self.bias is None else self.bias.add_(d_bias)

    def of(
        self, x_BSD: Tensor, weight: Tensor, bias: Tensor | None, *, factor: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of x_BSD, W and b in their types, times a factor; the sums are used up."""
        found: list[Tensor | None] = []
        dx_BSD = torch.cat(self.x).view(x_BSD.shape) if self.x else None
        # the chunks are released as soon as their concatenation exists
        self.x = []
        for gradient, param in ((dx_BSD, x_BSD), (self.weight, weight), (self.bias, bias)):
            if gradient is None or param is None:
                found.append(None)
                continue
            if factor is not None:
                gradient.mul_(factor)
            found.append(gradient[: len(param)].to(param.dtype))  # without the rows of zeros
        dx, d_weight, d_bias = found
        return dx, d_weight, d_bias


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """total + a b in a wide type; of 16 bits on a GPU without the rounding of a b."""
    if a.is_cuda and a.dtype != wide:
        if total is None:
            return torch.mm(a, b, out_dtype=wide)
        summed: Tensor = torch.ops.aten.addmm.dtype_out(total, a, b, wide, out=total)
        return summed
    if total is None:
        return (a @ b).to(wide)
    return total.addmm_(a, b) if a.dtype == wide else total.add_(a @ b)


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_BS: Tensor,
        chunks: _Chunks,
        is_ahead: bool,
    ) -> Tensor:
        gradients: _Gradients | None = None
        if is_ahead:
            gradients = _Gradients(ctx.needs_input_grad[:3])
        losses: list[Tensor] = []
        log_totals: list[Tensor] = []
        for chunk in chunks.of(x_BSD, weight_VD, bias_V, targets_BS):
            loss_C, log_total_C = chunk.losses(chunks.vocabulary)
            losses.append(loss_C)
            log_totals.append(log_total_C)
            if gradients is not None:
                counts_C = (chunk.targets_C != IGNORE).to(loss_C.dtype)
                gradients.add(chunk, log_total_C, counts_C)
        ctx.save_for_backward(x_BSD, weight_VD, bias_V, targets_BS, torch.cat(log_totals))
        ctx.chunks = chunks
        ctx.gradients = gradients
        return torch.cat(losses).view(targets_BS.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BS: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, weight_VD, bias_V, targets_BS, log_totals_N = ctx.saved_tensors
        gradients: _Gradients | None = ctx.gradients
        ctx.gradients = None  # a second backward of the same graph computes them again
        is_of_sum = not any(gradient_BS.stride())  # one number, expanded
        if gradients is not None and is_of_sum:
            factor = gradient_BS.flatten()[0]
            return *gradients.of(x_BSD, weight_VD, bias_V, factor=factor), *[None] * 3
        gradients = _Gradients(ctx.needs_input_grad[:3])
        weights_N = gradient_BS.flatten() * (targets_BS.flatten() != IGNORE)
        for chunk in ctx.chunks.of(x_BSD, weight_VD, bias_V, targets_BS):
            gradients.add(chunk, log_totals_N[chunk.rows], weights_N[chunk.rows])
        return *gradients.of(x_BSD, weight_VD, bias_V), *[None] * 3


class _TokenChunk:
    """The logits of some tokens, as far as their entries are here.

    Attributes:
        weight_VD: with rows of zeros, as `logits_CV` has columns for them.
        logits_CV: until they are overwritten by their gradient.
        softmax_CV: over the entries that are here; float32, or float64.
        log_total_C: log of the sum of exponentials of the logits that are here.
        places_C1: places of the targets among the entries that are here, 0 for others.
        is_here_C: which targets are among them.
        is_whole: whether all entries are here, and rows may get their weights later.
    """

    is_whole = False

    def __init__(
        self,
        rows: slice,
        x_CD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_C: Tensor,
        *,
        lo: int,
        num_entries: int,
    ) -> None:
        self.rows = rows
        self.x_CD = x_CD
        self.weight_VD = weight_VD
        self.logits_CV = logits_CV = F.linear(x_CD, weight_VD, bias_V)
        self.targets_C = targets_C
        self.dtype = torch.promote_types(logits_CV.dtype, torch.float32)
        self.log_total_C = self.log_of_total()
        places_C = targets_C - lo
        self.is_here_C = (places_C >= 0) & (places_C < num_entries)
        self.is_here_C = self.is_here_C & (targets_C != IGNORE)
        self.places_C1 = torch.where(self.is_here_C, places_C, 0).unsqueeze(-1)

    def log_of_total(self) -> Tensor:
        """The log of the sum of exponentials; the softmax is kept for the gradient."""
        self.softmax_CV = self.logits_CV.softmax(-1, dtype=self.dtype)
        # the largest probability is 1 / V at least: its log is exact where that of others is not
        largest_C1, places_C1 = self.logits_CV.max(-1, keepdim=True)
        largest_of_softmax_C1 = self.softmax_CV.gather(-1, places_C1)
        log_total_C1 = largest_C1.to(self.dtype) - largest_of_softmax_C1.log()
        return log_total_C1.squeeze(-1)

    def losses(self, vocabulary: WholeVocabulary) -> tuple[Tensor, Tensor]:
        """losses_C, 0 where a target does not count, and log_total_C over all entries."""
        of_targets_C = self.logits_CV.gather(-1, self.places_C1).squeeze(-1).to(self.dtype)
        of_targets_C = torch.where(self.is_here_C, of_targets_C, 0.0)
        largest_C = vocabulary.largest(self.log_total_C)
        shares_C = (self.log_total_C - largest_C).exp()
        totals_C, of_targets_C = vocabulary.total(torch.stack((shares_C, of_targets_C))).unbind(0)
        log_total_C = largest_C + totals_C.log()
        counts_C = self.targets_C != IGNORE
        return torch.where(counts_C, log_total_C - of_targets_C, 0.0), log_total_C

    def logit_gradient(self, log_total_C: Tensor, weights_C: Tensor) -> Tensor:
        """weights (softmax over all entries - 1 at the target) -> the gradient of logits_CV, whose
        memory it takes.
        """
        factors_C = weights_C * (self.log_total_C - log_total_C).exp()
        factors_C1 = factors_C.unsqueeze(-1)
        of_targets_C1 = self.softmax_CV.gather(-1, self.places_C1) * factors_C1
        ones_C1 = torch.where(self.is_here_C, weights_C, 0.0).unsqueeze(-1)
        # last use of the logits: what is read of the softmax has been gathered above
        gradient_CV = torch.mul(self.softmax_CV, factors_C1, out=self.logits_CV)
        return gradient_CV.scatter_(-1, self.places_C1, (of_targets_C1 - ones_C1).to(gradient_CV))

    def unweighted_gradient(self) -> Tensor:
        """softmax - 1 at the target -> the gradient of logits_CV for weights of 1, in memory of its own
        or in that of the logits.
        """
        ones_C1 = self.is_here_C.to(self.dtype).unsqueeze(-1)
        of_targets_C1 = self.softmax_CV.gather(-1, self.places_C1) - ones_C1
        gradient_CV = self.softmax_CV
        if gradient_CV.dtype != self.logits_CV.dtype:
            gradient_CV = self.logits_CV.copy_(gradient_CV)
        return gradient_CV.scatter_(-1, self.places_C1, of_targets_C1.to(gradient_CV.dtype))


class _CompiledChunk(_TokenChunk):
    """A chunk whose softmax is never in memory: compiled code reads its logits once for the sum of their
    exponentials, and once for their gradient.
    """

    def log_of_total(self) -> Tensor:
        log_total_C: Tensor = _compiled(_log_of_total, self.x_CD.device)(self.logits_CV)
        return log_total_C

    def logit_gradient(self, log_total_C: Tensor, weights_C: Tensor) -> Tensor:
        ones_C = torch.where(self.is_here_C, weights_C, 0.0)
        columns_C1 = log_total_C.unsqueeze(-1), weights_C.unsqueeze(-1), ones_C.unsqueeze(-1)
        compiled = _compiled(_logit_gradient, self.x_CD.device)
        return compiled(self.logits_CV, *columns_C1, self.places_C1)

    def unweighted_gradient(self) -> Tensor:
        return self.logit_gradient(self.log_total_C, torch.ones_like(self.log_total_C))


def _log_of_total(logits_CV: Tensor) -> Tensor:
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return wide_CV.logsumexp(-1)


def _logit_gradient(
    logits_CV: Tensor, log_total_C1: Tensor, weights_C1: Tensor, ones_C1: Tensor, places_C1: Tensor
) -> Tensor:
    softmax_CV = (logits_CV.to(log_total_C1.dtype) - log_total_C1).exp()
    columns_V = torch.arange(logits_CV.shape[-1], device=logits_CV.device)
    of_targets_CV = torch.where(columns_V == places_C1, ones_C1, 0.0)
    return (weights_C1 * softmax_CV - of_targets_CV).to(logits_CV.dtype)


@functools.cache
def _compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    return compile_function(function, device)


@dataclass(frozen=True)
class _Chunks:
    """How tokens are divided in chunks.

    Attributes:
        vocabulary: the entries that are here.
        length: tokens of a chunk.
        kind: class of the chunks.
    """

    vocabulary: WholeVocabulary
    length: int
    kind: type[_TokenChunk]

    def of(
        self, x_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_BS: Tensor
    ) -> Iterator[_TokenChunk]:
        """The chunks one after the other, the same rows on all ranks that share the vocabulary."""
        x_ND = x_BSD.flatten(0, -2)
        targets_N = targets_BS.flatten()
        num_entries = len(weight_VD)
        is_whole = num_entries == self.vocabulary.num_entries(weight_VD)
        weight_VD, bias_V = _with_rows_of_zeros(weight_VD, bias_V)
        for start in range(0, len(x_ND), self.length):
            rows = slice(start, min(start + self.length, len(x_ND)))
            chunk = self.kind(
                rows,
                x_ND[rows],
                weight_VD,
                bias_V,
                targets_N[rows],
                lo=self.vocabulary.lo,
                num_entries=num_entries,
            )
            # in float16 small entries of the gradient are kept by their weights alone
            chunk.is_whole = is_whole and chunk.logits_CV.dtype != torch.float16
            yield chunk


def _with_rows_of_zeros(weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """W and b with the rows that they lack to a multiple of `ROW_UNIT`, where W has 16 bits."""
    num_entries = len(weight_VD)
    missing = -num_entries % ROW_UNIT
    if weight_VD.element_size() != 2 or not missing:
        return weight_VD, bias_V
    if bias_V is None:
        bias_V = weight_VD.new_zeros(num_entries)
    bias_V = F.pad(bias_V, (0, missing), value=-math.inf)
    return F.pad(weight_VD, (0, 0, 0, missing)), bias_V


def takes_token_losses(loss: nn.Module) -> bool:
    """Whether a loss takes losses_BS in place of logits_BSV: the class itself says so, since a
    subclass may compute another loss.
    """
    return bool(vars(type(loss)).get("takes_token_losses", False))


def heads_with_losses(
    blocks: Mapping[str, nn.Module],
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Block name, module with a `head_output`, and the loss that takes its losses: a module of its
    own, or the next block. A projection with an adapter, or of a subclass, is no plain product.
    """
    names = [*blocks, ""]
    for name, following in itertools.pairwise(names):
        for module in heads_of(blocks[name]):
            own: nn.Module | None = getattr(module, "loss", None)
            loss = own if own is not None or not following else blocks[following]
            if loss is None or not takes_token_losses(loss):
                continue
            if _is_product(module.proj):  # type: ignore[arg-type]
                yield name, module, loss


def heads_of(block: nn.Module) -> Iterator[nn.Module]:
    """The modules of a block that have a `head_output`."""
    for module in block.modules():
        if isinstance(getattr(module, "head_output", None), HeadOutput):
            yield module


def set_head_output(head: nn.Module, output: HeadOutput) -> None:
    """Have a head hand on something else."""
    vars(head)["head_output"] = output


def _is_product(proj: nn.Module) -> bool:
    is_subclass = isinstance(proj, nn.Linear) and type(proj) is not nn.Linear
    return not is_subclass and getattr(proj, "lora_a", None) is None


def use_plain_losses(blocks: Mapping[str, nn.Module]) -> None:
    """Have heads hand on the losses of the targets, from whole logits: the shapes of
    `ChunkedLosses`.
    """
    for _, head, _ in heads_with_losses(blocks):
        set_head_output(head, PlainLosses())
