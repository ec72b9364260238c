"""Experts of a mixture, and the dispatch of tokens to them and back; no token is dropped, nothing loops over tokens.

Expert parallelism replaces the seam `Dispatch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.axes import span_sizes
from weft.core.expert_choice import (
    GROUPED_CAPABILITIES,
    ROW_UNIT_BYTES,
    ExpertCall,
    ExpertDevice,
    ExpertKernelChoice,
    ExpertKernelName,
    choose_expert_kernel,
)

DISPATCH = "weft_dispatch"
"""Child of a module that holds experts and sends tokens to them itself."""
MATRICES = "weft_matrices"
"""Attribute of such a module: names of its parameters that hold a matrix of each expert."""
PRODUCTS = "weft_products"
"""Attribute of modules whose experts compute other products: name of such a parameter -> its product."""

ExpertProduct = Callable[..., Tensor]
"""Called as `expert_linear`."""


@dataclass(frozen=True)
class PlannedKernels:
    """What predictions on the meta device say of the kernels of experts.

    Attributes:
        device: that kernels are chosen for.
        on_choice: called with each choice.
    """

    device: ExpertDevice
    on_choice: Callable[[ExpertKernelChoice], object]


@dataclass(frozen=True)
class ExpertLoads:
    """How many tokens each expert has, where tokens are in the order of their experts.

    Attributes:
        counts: [E] int64, on the device of the tokens.
        on_host: the same numbers, where a dispatch has read them; None: reading them waits for the
            device.
        planned: None: kernels are those of the tokens' device.
    """

    counts: Tensor
    on_host: tuple[int, ...] | None = None
    planned: PlannedKernels | None = None

    @cached_property
    def ends(self) -> Tensor:
        """Where the tokens of each expert end, [E] int32: on the device, where `grouped_mm` reads them."""
        return self.counts.cumsum(0, dtype=torch.int32)

    def lengths(self, num_tokens: int) -> tuple[int, ...]:
        """The counts on the host; of tensors without values (meta, or fake) an even load."""
        if self.on_host is None and not _has_values(self.counts):
            return span_sizes(num_tokens, len(self.counts))
        return self._lengths

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return self.on_host or tuple(self.counts.tolist())


class Experts(nn.Module):
    """E SwiGLU networks in three tensors; E and F are read from the weights, so shards along either
    work unchanged.
    """

    weft_matrices = ("gate", "up", "down")

    def __init__(self, dim: int, ffn: int, *, num_experts: int) -> None:
        super().__init__()
        inward = (num_experts, ffn, dim)
        outward = (num_experts, dim, ffn)
        self.gate = nn.Parameter(torch.empty(inward))
        self.up = nn.Parameter(torch.empty(inward))
        self.down = nn.Parameter(torch.empty(outward))
        for weight in self.parameters():
            bound = weight.shape[2] ** -0.5  # as each nn.Linear
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x_ND: Tensor, loads: ExpertLoads) -> Tensor:
        """Tokens in the order of their experts -> the same order; partial sums where F is sharded.

        Every expert gets a gradient, zeros if it saw no token.
        """
        gate, up, down = (expert_product(self, name) for name in self.weft_matrices)
        activated = F.silu(gate(x_ND, self.gate, loads))
        hidden = activated * up(x_ND, self.up, loads)
        return down(hidden, self.down, loads)


def expert_product(experts: nn.Module, name: str) -> ExpertProduct:
    """The product of tokens with the matrices that a parameter of these experts holds."""
    product: ExpertProduct = vars(experts).get(PRODUCTS, {}).get(name, expert_linear)
    return product


def expert_matrices(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Features out and in of the experts' matrices, by the name of the parameter that holds them; empty
    for a module whose experts do not call `expert_product`.
    """
    if DISPATCH not in module._modules and type(module).forward is not Experts.forward:
        return {}
    found = {}
    for name in getattr(module, MATRICES, ()):
        _, out_features, in_features = as_matrices(module, name).shape
        found[name] = (out_features, in_features)
    return found


def as_matrices(experts: nn.Module, name: str) -> Tensor:
    """A parameter of experts as weight_EMK; some modules of transformers hold weight_EKM."""
    weight: Tensor = getattr(experts, name)
    return weight.mT if getattr(experts, "is_transposed", False) else weight


def expert_linear(
    x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads, *, bias_EM: Tensor | None = None
) -> Tensor:
    """`F.linear` with the weight and the bias of each token's expert -> y_NM, in the same order."""
    kernel = _kernel_of(x_NK, weight_EMK, loads)
    if kernel == "loop":
        return _loop(x_NK, weight_EMK, loads, bias_EM)
    y_NM = F.grouped_mm(x_NK, weight_EMK.mT, offs=loads.ends)
    return y_NM if bias_EM is None else y_NM + _bias_of_tokens(x_NK, bias_EM, loads)


def expert_bias(x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads, bias_EM: Tensor) -> Tensor:
    """The bias of each token's expert."""
    if _kernel_of(x_NK, weight_EMK, loads) == "grouped":
        return _bias_of_tokens(x_NK, bias_EM, loads)
    lengths = loads.lengths(len(x_NK))
    biases = zip(bias_EM.unbind(), lengths, strict=True)
    return torch.cat([bias.expand(length, -1) for bias, length in biases])


def expert_weight_gradient(
    dy_NM: Tensor, x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads
) -> Tensor:
    """dy^T x of each expert's tokens, in the type of the operands and the layout of the weight."""
    if weight_EMK.mT.is_contiguous() and not weight_EMK.is_contiguous():
        return expert_weight_gradient(x_NK, dy_NM, weight_EMK.mT, loads).mT
    dy_NM = dy_NM.contiguous()
    if _kernel_of(x_NK, weight_EMK, loads) == "grouped":
        return F.grouped_mm(dy_NM.mT, x_NK, offs=loads.ends)
    lengths = loads.lengths(len(x_NK))
    runs = zip(dy_NM.split(lengths), x_NK.split(lengths), strict=True)
    return torch.stack([dy_run.t() @ x_run for dy_run, x_run in runs])


def _kernel_of(x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads) -> ExpertKernelName:
    """The kernel of a product in the type of these operands."""
    return chosen_kernel(
        x_NK,
        weight_EMK,
        loads,
        dtype=str(x_NK.dtype).removeprefix("torch."),
        is_aligned=_is_aligned(x_NK) and (_is_aligned(weight_EMK) or _is_aligned(weight_EMK.mT)),
    )


def chosen_kernel(
    x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads, *, dtype: str, is_aligned: bool
) -> ExpertKernelName:
    """The kernel for operands of these shapes, on their device; of the planned device where they have
    no values.

    Args:
        dtype, is_aligned: of the operands of the kernel, see `ExpertCall`.
    """
    planned = loads.planned
    device = _device_of(x_NK) if planned is None else planned.device
    if device is None:
        return "loop"  # shapes alone
    num_experts, columns, inner = weight_EMK.shape
    call = ExpertCall(
        dtype,
        rows=len(x_NK),
        inner=inner,
        columns=columns,
        num_experts=num_experts,
        is_aligned=is_aligned,
    )
    choice = choose_expert_kernel(call, device)
    if planned is not None:
        planned.on_choice(choice)
    return choice.kernel


def _device_of(x: Tensor) -> ExpertDevice | None:
    """The device of a tensor; of one without values a GPU of any kind; None: the meta device, whose
    operations are traced.
    """
    if x.is_meta:
        return None
    if not x.is_cuda:
        return ExpertDevice("cpu")
    return _gpu(x.device) if _has_values(x) else ExpertDevice("cuda", (GROUPED_CAPABILITIES[0], 0))


@lru_cache(maxsize=64)
def _gpu(device: torch.device) -> ExpertDevice:
    return ExpertDevice("cuda", torch.cuda.get_device_capability(device))


def _is_aligned(x: Tensor) -> bool:
    """Whether rows lie one after the other, the first at a multiple of 16 bytes."""
    if not x.is_contiguous():
        return False
    return not _has_values(x) or x.data_ptr() % ROW_UNIT_BYTES == 0


def _bias_of_tokens(x_NK: Tensor, bias_EM: Tensor, loads: ExpertLoads) -> Tensor:
    """The bias of each token's expert, as a product: its gradient is a sum in fixed order, where that
    of an index adds with atomics.
    """
    unit = ROW_UNIT_BYTES // x_NK.element_size()
    one_NK = x_NK.new_zeros(len(x_NK), unit)
    one_NK[:, 0] = 1
    bias_EKM = F.pad(bias_EM.unsqueeze(1), (0, 0, 0, unit - 1))
    return F.grouped_mm(one_NK, bias_EKM, offs=loads.ends)


def _loop(x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads, bias_EM: Tensor | None) -> Tensor:
    """Expert after expert; those without tokens are skipped."""
    num_tokens = len(x_NK)
    # taken apart at once, as they lie in memory, so that the backward fills one tensor of that layout
    if weight_EMK.is_contiguous():
        weights = weight_EMK.unbind()
    else:
        weights = tuple(weight_KM.T for weight_KM in weight_EMK.mT.unbind())
    biases = [None] * len(weights) if bias_EM is None else bias_EM.unbind()
    runs = x_NK.split(loads.lengths(num_tokens))
    outputs = [
        F.linear(run, weight, bias)
        for run, weight, bias in zip(runs, weights, biases, strict=True)
        if len(run) > 0 or num_tokens == 0
    ]
    return torch.cat(outputs)


def _has_values(tensor: Tensor) -> bool:
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # where it is not loaded, none is fake
    return not tensor.is_meta and not (fakes and isinstance(tensor, fakes.FakeTensor))


@dataclass(frozen=True)
class Sorting:
    """The order of slots by expert, where slot n K + k is the k-th choice of token n.

    Attributes:
        slots: the slot at each place of the order, [N K] int64.
        places: the place of each slot, [N, K] int64.
        counts: how many slots each expert has, [E] int64.
    """

    slots: Tensor
    places: Tensor
    counts: Tensor

    def spread(self, x_ND: Tensor) -> Tensor:
        """A copy of its token for each slot, in order."""
        tokens = self.slots // self.places.shape[1]
        return _gather(x_ND, tokens, users_NK=self.places)

    def collect(self, rows: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted sum over each token's slots, from rows in order -> y_ND of the rows' dtype."""
        slots = _gather(rows, self.places.flatten(), users_NK=self.slots.unsqueeze(1))
        slots_NKD = slots.unflatten(0, self.places.shape)
        weights_NK1 = weights_NK.unsqueeze(-1)
        y_ND: Tensor = (slots_NKD * weights_NK1).sum(1)
        return y_ND.to(rows.dtype)


def sort_by_expert(experts_NK: Tensor, num_experts: int) -> Sorting:
    """Slots by expert, those of one expert by token."""
    experts = experts_NK.flatten()
    # stable: tokens of one expert keep their order, so that sums over them are the same on any layout
    slots = experts.argsort(stable=True)
    order = torch.arange(len(slots), device=slots.device)
    places = torch.empty_like(slots)
    # the inverse permutation; no place is written twice
    places.scatter_(0, slots, order)
    counts_1E = count_experts(experts.unsqueeze(0), num_experts)
    return Sorting(slots, places.view_as(experts_NK), counts_1E[0])


def _gather(x: Tensor, index: Tensor, *, users_NK: Tensor) -> Tensor:
    """x[index], where row n of x goes to the places users_NK[n]; its backward is a gather too, in
    fixed order.

    The backward of plain indexing adds to rows: on a GPU with atomics, in another order each time.
    """
    rows: Tensor = _Gather.apply(x, index, users_NK)  # type: ignore[no-untyped-call]
    return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, users_NK: Tensor) -> Tensor:
        ctx.save_for_backward(users_NK)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (users_NK,) = ctx.saved_tensors
        rows = dy.index_select(0, users_NK.flatten())
        dx = rows.unflatten(0, users_NK.shape).sum(1)
        return dx, None, None


class Dispatch(nn.Module):
    """Seam: sends each token to its experts and returns the weighted sum of their outputs; no token
    is dropped.

    A subclass that dispatches otherwise must override `requirements`, too: expert parallelism
    rejects what it lacks.
    """

    left_out = ("forward",)

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.planned: PlannedKernels | None = None

    @property
    def requirements(self) -> frozenset[str]:
        """What an implementation in its place must compute."""
        return frozenset({"dropless"})

    def forward(
        self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, experts: nn.Module
    ) -> Tensor:
        """x_ND -> y_ND; `experts(x, loads)` takes tokens in the order of their experts and keeps
        that order.
        """
        sorting = sort_by_expert(experts_NK, self.num_experts)
        rows = sorting.spread(x_ND)
        rows_out: Tensor = experts(rows, ExpertLoads(sorting.counts, planned=self.planned))
        return sorting.collect(rows_out, weights_NK)


def count_experts(experts_BN: Tensor, num_experts: int) -> Tensor:
    """How often each row names each expert: experts_BN -> counts_BE int64."""
    num_rows = experts_BN.shape[0]
    counts_BE = experts_BN.new_zeros(num_rows, num_experts)
    ones_BN = torch.ones_like(experts_BN)
    return counts_BE.scatter_add_(1, experts_BN, ones_BN)
