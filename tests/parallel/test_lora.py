"""LoRA adapters on any layout: gradients, norms and updates of one device; frozen parameters unchanged, no state for them.

The gradients of one device are compared with autograd through W + (alpha / rank) B A as a function
of A and B."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.live import storage_bytes
from tests.matrix.layouts import (
    CLIP,
    LR,
    SEED,
    Case,
    batches,
    make_step,
    on_one_device,
    own_micro_batches,
    subject_of,
)
from tests.matrix.sweep import sample
from tests.one_device import check_records, gradients, one_device, plain_model, records_of
from tests.parallel.test_traffic import sent_by_axis
from tests.sampling import sampled
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.config.lora import LORA_A, LORA_B, LORA_M, adapted_linear, adapted_linears
from weft.config.schema import LoraConfig
from weft.errors import PlanError
from weft.models import FAMILIES, Family
from weft.models.common.batch import chain
from weft.models.common.init import named_parameters
from weft.models.common.lora import AdaptedFamily, LoraFactor, LoraLinear, adapted
from weft.parallel.zero.grouping import make_gradient_reducer
from weft.prove.bounds import Bounds
from weft.prove.subject import Subject
from weft.testing import run_ranks
from weft.train.build import build_model

LORA = LoraConfig(rank=3, alpha=5.0)
NUM_STEPS = 2


@pytest.fixture(autouse=True)
def shaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters whose B is not zero at the start, so that every gradient has something to say from
    the first step on.
    """
    right = AdaptedFamily.init
    rule = {f"*{LORA_B}": ("normal", 0.3), f"*{LORA_M}": ("normal", 0.3)}
    monkeypatch.setattr(AdaptedFamily, "init", lambda self, cfg: {**right(self, cfg), **rule})


def family_of(case: Case, lora: LoraConfig = LORA) -> Family:
    return adapted(FAMILIES[case.family], lora)


def adapted_subject(case: Case, lora: LoraConfig) -> Subject:
    return subject_of(case, num_steps=NUM_STEPS, values={"lora": lora})


@cache
def truth(case: Case, lora: LoraConfig) -> Bounds:
    return one_device(adapted_subject(case, lora))


def check(case: Case, lora: LoraConfig = LORA) -> None:
    right = truth(on_one_device(case), lora)
    is_clipped = right.plain.values[1, "clip", "clip factor"] < 1
    assert lora != LORA or case.clip != CLIP or is_clipped, "clipping must act in this test"
    subject = adapted_subject(case, lora)
    records = records_of(subject)
    check_records(subject, records, right)
    start = starting_values(case, lora)
    for record in records:
        for site, seen in record.values.items():
            is_adapter = adapted_linear(site.parameter) is not None
            assert site.phase != "reduce" or is_adapter, "only adapters have gradients"
            if (site.step, site.phase) == (NUM_STEPS, "update"):
                own = seen.place.read(start[site.parameter])
                assert torch.equal(seen.value, own) != is_adapter, (
                    f"{site.parameter}: the base stays, adapters move"
                )


def starting_values(case: Case, lora: LoraConfig) -> dict[str, Tensor]:
    return named_parameters(
        plain_model(family_of(case, lora), case.config, seed=SEED, dtype=torch.float64)
    )


TINY = {"layers": 2, "microbatches": 2}
LAYOUTS = (
    Case("tp2", **TINY),
    Case("tp2", family="gpt2", **TINY),
    Case("tp2", family="gpt2", sequence=True, recompute="selective", **TINY),
    Case("tp2", family="qwen3", sequence=True, recompute="full", **TINY),
    Case("pp2 dp2 tp2", sequence=True, zero=1, grouped=True, **TINY),
    Case("dp2", zero=1, **TINY),
    Case("pp2 dp2", zero=3, family="gpt2", **TINY),
    Case("cp2", **TINY),
    Case("pp2 dp2", zero=3, recompute="selective", schedule="zero_bubble", **TINY),
    Case(
        "pp2 tp2", schedule="zbv", chunks=2, family="gpt2", sequence=True, layers=4, microbatches=2
    ),
    Case("ep2", family="deepseek", **TINY),
    Case("ep2", family="qwen3-moe", zero=3, **TINY),
)
MORE_LAYOUTS = (
    Case("pp2 dp2 tp2", family="gpt2", **TINY),
    Case("dp2", zero=3, family="gpt2", **TINY),
    Case("dp2 tp2", zero=3, sequence=True, **TINY),
    Case("pp2", schedule="zero_bubble", **TINY),
    Case("tp2", family="deepseek", sequence=True, **TINY),
)
"""Their parts are in LAYOUTS."""


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_LAYOUTS, ids=str)
def test_more_layouts_compute_what_one_device_computes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", sampled(LAYOUTS), ids=str)
def test_layout_computes_what_one_device_computes(case: Case) -> None:
    check(case)


DORA = LoraConfig(rank=3, alpha=5.0, dora=True)
DORA_LAYOUTS = (
    Case("tp2", family="gpt2", sequence=True, recompute="selective", **TINY),
    Case("pp2 dp2 tp2", sequence=True, zero=1, grouped=True, **TINY),
    Case("dp2 tp2", zero=3, **TINY),
    Case("pp2", schedule="zero_bubble", **TINY),
    Case("cp2 tp2", family="qwen2", **TINY),
    Case("ep2", family="deepseek", **TINY),
)


@pytest.mark.parametrize("case", DORA_LAYOUTS, ids=str)
def test_magnitudes_are_those_of_one_device(case: Case) -> None:
    check(case, DORA)


def test_one_device_with_magnitudes_equals_autograd_through_the_normed_sum() -> None:
    """y = (|W| + d) (W + s B A) x / |W + s B A| + b, the norm a constant, by rows, in plain torch."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 5, dtype=torch.float64)
    adapted_linear = LoraLinear.from_linear(linear, DORA).double()
    with torch.no_grad():
        for part in (adapted_linear.lora_a, adapted_linear.lora_b, adapted_linear.lora_magnitude):
            part.weight.copy_(torch.randn(part.weight.shape, dtype=torch.float64))
    x = torch.randn(4, 6, dtype=torch.float64)
    adapted_linear(x).square().sum().backward()
    a, b, d = (
        part.weight.detach().clone().requires_grad_()
        for part in (adapted_linear.lora_a, adapted_linear.lora_b, adapted_linear.lora_magnitude)
    )
    total = linear.weight.detach() + 5 / 3 * b @ a
    norm = torch.linalg.vector_norm(total, dim=1, keepdim=True).detach()
    m = torch.linalg.vector_norm(linear.weight.detach(), dim=1, keepdim=True) + d[:, None]
    y = x @ (m * total / norm).T + linear.bias.detach()
    torch.testing.assert_close(adapted_linear(x), y, rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    parts = (adapted_linear.lora_a, adapted_linear.lora_b, adapted_linear.lora_magnitude)
    for right, part in zip((a, b, d), parts, strict=True):
        torch.testing.assert_close(part.weight.grad, right.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitudes_start_as_the_base_bit_for_bit(dtype: torch.dtype) -> None:
    linear = nn.Linear(48, 32, dtype=dtype)
    adapted_linear = LoraLinear.from_linear(linear, DORA).to(dtype)
    with torch.no_grad():
        adapted_linear.lora_a.weight.normal_()
        adapted_linear.lora_b.weight.zero_()
        adapted_linear.lora_magnitude.weight.zero_()
    x = torch.randn(4, 48, dtype=dtype)
    product = torch.nn.functional.linear(x, linear.weight)
    assert torch.equal(adapted_linear(x), product + linear.bias)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(120, seed=21, most_ranks=16), ids=str)
def test_sampled_layout_computes_what_one_device_computes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        (Case("pp2", **TINY), ("layer1.attn.*",)),
        (Case("pp2 tp2", schedule="zero_bubble", **TINY), ("layer1.mlp.up",)),
        (Case("tp2", family="gpt2", **TINY), ("attn.o", "down")),
        (Case("dp2", zero=3, **TINY), ("q", "v")),
    ],
    ids=str,
)
def test_some_linears_alone_and_stages_where_nothing_is_trained(
    case: Case, targets: tuple[str, ...]
) -> None:
    check(case, LoraConfig(rank=2, alpha=8.0, targets=targets))


def use_merged_weights(
    blocks: Mapping[str, nn.Module], start: Mapping[str, Tensor], factors: Mapping[str, Tensor]
) -> None:
    """Replace the weight of each adapted linear by W + (alpha / rank) B A."""
    scale = LORA.alpha / LORA.rank
    for name, block in blocks.items():
        for path, module in list(block.named_modules()):
            linear = f"{name}.{path}"
            if linear + LORA_A in factors:
                weight = start[f"{linear}.weight"].detach()
                del module.weight
                change = scale * factors[linear + LORA_B] @ factors[linear + LORA_A]
                module.weight = weight + change


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen3", "qwen3-moe", "deepseek"])
def test_one_device_computes_the_gradients_of_merged_weights(name: str) -> None:
    """No adapter runs here: each weight is a function of A and B, and autograd does the rest."""
    case = Case("", family=name, **TINY)
    plain = plain_model(FAMILIES[name], case.config, seed=SEED, dtype=torch.float64)
    start = starting_values(case, LORA)
    factors = {}
    for each, value in start.items():
        if adapted_linear(each) is not None:
            factors[each] = value.detach().requires_grad_()
    use_merged_weights(plain, start, factors)
    expected = 2 * len(adapted_linears((), case.config.linears()))
    assert len(factors) == expected
    batch = batches(case)[0]
    out = chain(plain, batch.inputs, batch)
    if out.loss is None:
        total = out.x
    else:
        total = out.x + out.loss
    loss = total / batch.num_targets()
    loss.backward()
    norms = [factor.grad.norm() for factor in factors.values()]
    norm = torch.stack(norms).norm()
    trace = truth(case, LORA).plain
    first = gradients(trace, 1)
    assert first.keys() == factors.keys(), "every adapter, and nothing else"
    assert trace.values[1, "loss", "loss"].item() == pytest.approx(loss.item(), rel=1e-12)
    assert trace.values[1, "norm", "gradient norm"].item() == pytest.approx(norm.item(), rel=1e-12)
    for each, factor in factors.items():
        right = factor.grad * CLIP / (norm + 1e-6)
        error = (first[each] - right).abs().max()
        assert error <= 1e-12 * right.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_configs_name_linears_that_are_there_with_their_sizes(name: str) -> None:
    for preset in FAMILIES[name].PRESETS.values():
        cfg = preset.model_copy(update={"layers": min(4, preset.layers)})  # type: ignore[attr-defined]
        with torch.device("meta"):
            blocks = nn.ModuleDict(FAMILIES[name].blocks(cfg))
        for linear, sizes in cfg.linears().items():
            module = blocks.get_submodule(linear)
            assert isinstance(module, nn.Linear)
            assert tuple(module.weight.shape) == sizes
        modules = dict(blocks.named_modules())
        named = {path for path, module in modules.items() if isinstance(module, nn.Linear)}
        outside = (
            "embed.",
            "head.",
            "mtp",
            "router",
        )  # the ends, and what mixtures and side blocks have for themselves
        assert cfg.kind == "images" or named - set(cfg.linears()) == {
            path for path in named if any(word in path for word in outside)
        }


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen3", "qwen3-moe", "deepseek"])
def test_an_adapter_starts_as_nothing_whatever_the_layout(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    family = adapted(FAMILIES[name], LORA)
    cfg = FAMILIES[name].Config()
    params = named_parameters(plain_model(family, cfg, seed=SEED, dtype=torch.float32))
    plain = named_parameters(plain_model(FAMILIES[name], cfg, seed=SEED, dtype=torch.float32))
    for each, value in params.items():
        if adapted_linear(each) is None:
            assert torch.equal(value, plain[each])
            assert not value.requires_grad
        elif each.endswith(LORA_B):
            assert not value.any()
        else:
            expected = (3 * value.shape[1]) ** -0.5
            assert value.std().item() == pytest.approx(expected, rel=0.2)
    assert len(
        {value.sum().item() for each, value in params.items() if each.endswith(LORA_A)}
    ) == len(cfg.linears()), "each by its own name"


def test_rank_0_is_the_plain_family() -> None:
    assert adapted(FAMILIES["llama3"], LoraConfig()) is FAMILIES["llama3"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_only_adapters_have_gradients_and_optimizer_state(zero: Any) -> None:
    """12 bytes an entry in float32 (gradient, two moments) for adapters alone; the base is halved
    by ZeRO 3.
    """
    case = Case("dp2", zero=zero, **TINY)

    def rank(comm: Comm) -> tuple[int, int, int, int]:
        plan = case.plan.model_copy(
            update=dict.fromkeys(("params", "compute", "reduce"), "float32")
        )
        built = build_model(family_of(case), case.config, plan, comm, seed=SEED)
        grads = make_gradient_reducer(built)
        states = 2 * sum(tensor.numel() for tensor in grads.sharded_params.values())
        gradients = sum(tensor.grad.numel() for tensor in grads.sharded_params.values())
        adapters = sum(
            piece.box.size
            for name, piece in built.shards.items()
            if adapted_linear(name) is not None
        )
        assert {adapted_linear(name) is not None for name in grads.sharded_params} == {True}
        return (
            states,
            gradients,
            adapters,
            storage_bytes(
                value for name, value in built.params.items() if not adapted_linear(name)
            ),
        )

    found = run_ranks(case.mesh, rank)
    adapters = found[0][2]
    shards = 2 if zero else 1
    total = sum(states for states, *_ in found)
    assert total == 2 * adapters * 2 // shards
    total = sum(gradients for _, gradients, *_ in found)
    assert total == adapters * 2 // shards
    base = sum(
        value.numel() * 4
        for name, value in starting_values(case, LORA).items()
        if not adapted_linear(name)
    )
    for *_, num_bytes in found:
        assert num_bytes == (0 if zero == 3 else base), (
            "on demand the blocks' own memory is freed between steps"
        )


@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
def test_mixed_precision_holds_the_base_in_the_type_of_compute(reduce: str) -> None:
    """Sharded or whole, the base is the same bfloat16 numbers and adapters are updated in float32.
    One micro-batch: ZeRO 3 adds over ranks first, and bfloat16 sums of four depend on the order.
    Nothing is clipped: the last bits of a norm depend on the order in which a CPU adds its squares.
    """
    mesh = "dp2"
    case = Case(mesh, clip=0.0, layers=2, microbatches=1)
    dtypes = {"params": "float32", "compute": "bfloat16", "reduce": reduce}

    def rank(comm: Comm, zero: int) -> tuple[float, ...]:
        plan = case.plan.model_copy(update={"zero": zero, **dtypes})
        step = make_step(case, comm, family=family_of(case), plan=plan)
        for value in step.grads.sharded_params.values():
            assert value.dtype == torch.float32
        for value in step.model.params.values():
            assert value.dtype == torch.bfloat16
        losses = []
        for index in range(NUM_STEPS):
            report = step(own_micro_batches(case, comm, step=index), lr=LR)
            losses.append(report.loss)
        return tuple(losses)

    losses = []
    for zero in (0, 1, 3):
        ranks = run_ranks(mesh, lambda comm, zero=zero: rank(comm, zero))
        losses.append(ranks[0])
    assert losses[0] == losses[1] == losses[2]
    trace = truth(on_one_device(case), LORA).plain
    right = [trace.values[step, "loss", "loss"].item() for step in (1, 2)]
    assert losses[0] == pytest.approx(right, rel=2**-7), "bfloat16 rounds at 2^-8"


@pytest.mark.parametrize("sequence", [False, True])
def test_adapters_add_no_operation_between_tensor_ranks_but_the_sum_of_their_gradients(
    sequence: bool,
) -> None:
    """What the plain model sends over tp, less the input gradient of the first layer, and the whole
    factors' gradients once.
    """
    case = Case("tp2", sequence=sequence, bucket_bytes=2**30, **TINY)

    def bytes_over_tp(comm: Comm, family: Family) -> tuple[int, int]:
        """All that a rank sends in a step; the gradients that are summed at its end."""
        step = make_step(case, comm, family=family)
        counter = Counter()
        comm.observers = (counter,)
        step(own_micro_batches(case, comm), lr=LR)
        summed_entries = 0
        for name, piece in step.model.shards.items():
            if piece.reduce_axes and step.model.params[name].requires_grad:
                summed_entries += piece.box.size
        return sent_by_axis(counter)["tp"], 8 * summed_entries

    def of_first_rank(family: Family) -> tuple[int, int]:
        return run_ranks(case.mesh, lambda comm: bytes_over_tp(comm, family))[0]

    plain, plain_summed = of_first_rank(FAMILIES[case.family])
    ours, our_summed = of_first_rank(family_of(case))
    width = case.seq_len * case.config.dim * 8  # type: ignore[attr-defined]
    input_gradient = 2 * (width // 2) if sequence else width
    unneeded = case.microbatches * input_gradient
    assert plain - ours == plain_summed - our_summed + unneeded


Patch = Callable[[pytest.MonkeyPatch], None]
# Other faults of adapters are mutants of weft_selftest.mutants, which tests/matrix/test_mutants.py plants.
MUTANTS: dict[str, tuple[Case, Patch]] = {}


def mutant(case: Case) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS[patch.__name__] = case, patch
        return patch

    return register


@mutant(Case("dp2", zero=3, **TINY))
def adapters_are_scaled_twice(patch: pytest.MonkeyPatch) -> None:
    right = LoraFactor.forward
    patch.setattr(LoraFactor, "forward", lambda self, x: self.scale * right(self, x))


@mutant(Case("tp2", **TINY))
def the_rank_is_cut_instead_of_the_features(patch: pytest.MonkeyPatch) -> None:
    right = AdaptedFamily.axes

    def axes(self: AdaptedFamily, cfg: Any) -> Any:
        table = right(self, cfg)
        turned = {}
        for row, names in table.items():
            if row.endswith(LORA_B):
                turned[row] = tuple(reversed(names))
        return {**table, **turned}

    patch.setattr(AdaptedFamily, "axes", axes)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, patch = MUTANTS[name]
    check(case)
    patch(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, PlanError)):
        check(case)
