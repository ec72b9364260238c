"""Equal blocks are traced once; a block that differs in anything its forward can read is traced separately."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.parallel.test_user_models import (
    ATTENTION,
    ENDS,
    MLP,
    VOCAB,
    D,
    InlineMLP,
    linear,
    plan_of,
)
from tests.sampling import sampled_pairs
from weft.comm.comm import Comm
from weft.comm.transport import SharedResults
from weft.core.mesh import Mesh
from weft.core.model_config import AxisTable
from weft.layout.plan import Plan, Stage, make_stages
from weft.models import FAMILIES
from weft.models.common.batch import Batch, Extra, image_example, token_example
from weft.models.common.init import named_parameters
from weft.models.common.layers import Embed, Head, Loss
from weft.parallel.model import chain
from weft.parallel.model.chain import ChainSnapshot
from weft.parallel.model.fingerprint import fingerprint
from weft.parallel.tensor import trace, transform
from weft.parallel.tensor.sharding_mode import Findings
from weft.testing import run_ranks
from weft.train.init_from import meta_modules

AXES: AxisTable = {**ENDS, **ATTENTION, **MLP, "layer*.scale": ()}
LAYOUTS = ("tp2", "tp2, sequence parallel")


class Layer(InlineMLP):
    """A layer whose attribute `softmax` makes it compute something else on shards."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = False
        self.act = nn.Tanh()
        self.options = {"gain": 1.0}

    def mlp(self, y: Tensor) -> Tensor:
        up = self.act(self.up(y)) * self.options["gain"]
        return self.down(up.softmax(-1) if self.softmax else up)


def layers(make: Callable[[], nn.Module] = Layer, *, num: int = 3) -> dict[str, nn.Module]:
    torch.manual_seed(3)
    blocks: dict[str, nn.Module] = {"embed": Embed(VOCAB, D)}
    for index in range(num):
        blocks[f"layer{index}"] = make()
    blocks["head"] = Head(nn.RMSNorm(D), linear(D, VOCAB))
    blocks["loss"] = Loss()
    return {name: block.double() for name, block in blocks.items()}


@contextmanager
def recorded(attribute: str, module: object) -> Iterator[list[tuple[object, ...]]]:
    """Arguments and result of each call of a function."""
    calls: list[tuple[object, ...]] = []
    original = getattr(module, attribute)

    def call(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append((*args, result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, attribute, call)
        yield calls


def names_of(runs: list[tuple[object, ...]]) -> list[str]:
    """Names of the traced blocks, once each: shards of the last rank may be traced, too."""
    return list(dict.fromkeys(str(name) for name, *_ in runs))


def traced(
    blocks: dict[str, nn.Module], layout: str = "tp2", axes: AxisTable = AXES
) -> tuple[list[str], Findings]:
    """Names of the blocks that rank 0 traces, and what it finds."""
    stage = Stage(blocks=tuple(blocks), out=(), flops=1.0)
    plan = plan_of(layout).model_copy(update={"stages": (stage,)})

    def rank(comm: Comm) -> tuple[list[str], Findings]:
        if comm.rank:
            return [], Findings()
        with recorded("_run", trace) as runs, recorded("_trace", transform) as traces:
            weft.parallelize(copy.deepcopy(blocks), plan, comm, axes=axes)
        (*_, findings) = traces[0]
        return names_of(runs), findings

    return run_ranks("tp2", rank)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_layers_are_traced_once_and_each_has_its_findings(layout: str) -> None:
    names, findings = traced(layers(num=5), layout)
    assert names == ["embed", "layer0", "head", "loss"]
    for index in range(5):
        readers = [f"layer{index}.{path}" for path in ("q", "k", "v")]
        assert findings.entries[f"layer{index}.q"] == readers
        uses = findings.uses[f"layer{index}.attn_norm.weight"]
        assert uses == {layout != "tp2"}


def set_attribute(layer: Layer) -> None:
    layer.softmax = True


def replace_function(layer: Layer) -> None:
    del layer.act
    layer.act = lambda up: up.softmax(-1)


def add_hook(layer: Layer) -> None:
    layer.act.register_forward_hook(lambda _, __, up: up.softmax(-1))


def add_hook_before(layer: Layer) -> None:
    layer.act.register_forward_pre_hook(lambda _, args: (args[0].softmax(-1),))


def change_class(layer: Layer) -> None:
    class Softmax(Layer):
        def mlp(self, y: Tensor) -> Tensor:
            return self.down(self.up(y).softmax(-1))

    layer.__class__ = Softmax


def replace_child(layer: Layer) -> None:
    layer.act = nn.Softmax(-1)


CHANGES = (set_attribute, replace_function, add_hook, add_hook_before, change_class, replace_child)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_layer_that_differs_from_the_others_is_rejected_as_it_would_be_alone(
    change: Callable[[Layer], None],
) -> None:
    blocks = layers()
    last = blocks["layer2"]
    assert isinstance(last, Layer)
    change(last)
    with pytest.raises(weft.WeftError, match=r"layer2.*softmax over a sharded dim"):
        traced(blocks)


def nested_value(layer: Layer) -> None:
    layer.options["gain"] = 2.0


def negative_zero(layer: Layer) -> None:
    layer.options["gain"] = -0.0


def frozen_parameter(layer: Layer) -> None:
    layer.up.weight.requires_grad_(False)


def another_buffer(layer: Layer) -> None:
    layer.register_buffer("table", torch.zeros(2))


def evaluation(layer: Layer) -> None:
    layer.up.eval()


def tied_inside(layer: Layer) -> None:
    layer.k.weight = layer.v.weight


def numpy_attribute(layer: Layer) -> None:
    layer.table = torch.zeros(2).numpy()


def generator_attribute(layer: Layer) -> None:
    layer.generator = (number for number in range(2))


DIFFERENCES = (
    nested_value,
    negative_zero,
    frozen_parameter,
    another_buffer,
    evaluation,
    tied_inside,
)


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: change.__name__)
def test_a_layer_that_differs_in_one_thing_is_traced_on_its_own(
    change: Callable[[Layer], None],
) -> None:
    blocks = layers()
    assert isinstance(blocks["layer1"], Layer)
    change(blocks["layer1"])
    names, _ = traced(blocks)
    assert names == ["embed", "layer0", "layer1", "head", "loss"]


def test_layers_whose_axes_differ_are_traced_each() -> None:
    axes = {
        **ENDS,
        **ATTENTION,
        "layer1.up.weight": ("whole", "embed"),
        "layer1.up.bias": ("whole",),
        "layer1.down.weight": ("embed", "whole"),
        "layer*.down.bias": ("embed",),
    }
    for index in (0, 2):
        axes[f"layer{index}.up.weight"] = ("ffn", "embed")
        axes[f"layer{index}.up.bias"] = ("ffn",)
        axes[f"layer{index}.down.weight"] = ("embed", "ffn")
    names, findings = traced(layers(), axes=axes)
    assert names == ["embed", "layer0", "layer1", "head", "loss"]
    assert "layer2.up" in findings.entries
    assert "layer1.up" not in findings.entries


def test_a_parameter_tied_between_layers_has_both_traced() -> None:
    blocks = layers(num=4)
    blocks["layer2"].up.weight = blocks["layer1"].up.weight
    names, _ = traced(blocks)
    assert names == ["embed", "layer0", "layer1", "layer2", "head", "loss"]


class Scaled(Layer):
    """A scale inside its regions or outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.is_inside = True

    def mlp(self, y: Tensor) -> Tensor:
        if self.is_inside:
            return self.down(self.scale * self.up(y))
        return self.scale * super().mlp(y)


def test_a_tied_scale_on_both_sides_is_rejected_where_each_layer_alone_is_not() -> None:
    blocks = layers(Scaled)
    blocks["layer2"].is_inside = False
    _, findings = traced(blocks)
    assert findings.uses["layer1.scale"] == {True}
    assert findings.uses["layer2.scale"] == {False}
    blocks["layer2"].scale = blocks["layer1"].scale
    with pytest.raises(weft.WeftError, match=r"layer1\.scale is used both inside and outside"):
        traced(blocks)


class Count:
    """An object that several layers hold."""

    calls = 0


class Counting(Layer):
    """The third call of its counter makes it compute something else."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def mlp(self, y: Tensor) -> Tensor:
        self.count.calls += 1
        self.softmax = self.count.calls == 3
        return super().mlp(y)


def test_layers_whose_forward_changes_a_shared_object_are_traced_each() -> None:
    count = Count()
    with pytest.raises(weft.WeftError, match=r"layer2.*softmax over a sharded dim"):
        traced(layers(lambda: Counting(count)))


@pytest.mark.parametrize(
    "make", [numpy_attribute, generator_attribute], ids=lambda make: make.__name__
)
def test_a_module_that_cannot_be_compared_has_no_fingerprint(make: Callable[[Layer], None]) -> None:
    layer = Layer()
    assert fingerprint(layer) == fingerprint(Layer())
    make(layer)
    assert fingerprint(layer) is None


class AuxiliaryReader(Layer):
    """Returns its input; a column-parallel linear reads it for a second loss."""

    def forward(self, x: Tensor, batch: Batch) -> Extra:
        return Extra(x, loss=self.down(self.up(x)).sum())


def test_an_entry_is_not_shared_with_a_linear_of_another_block() -> None:
    """Before, the second block's linear was looked up in the first block: KeyError."""
    blocks = layers(AuxiliaryReader)
    _, findings = traced(blocks)
    for index in range(3):
        entries = findings.entries[f"layer{index}.up"]
        assert entries == [f"layer{index}.up"]


@pytest.mark.parametrize(
    ("family", "sequence_parallel"), sampled_pairs(list(FAMILIES), (False, True))
)
def test_findings_are_those_of_a_trace_of_every_block(family: str, sequence_parallel: bool) -> None:
    folder = FAMILIES[family]
    config = folder.Config()
    is_images = config.kind == "images"
    if is_images and sequence_parallel:
        pytest.skip("images have no sequence")
    plan = Plan(
        mesh=Mesh.parse("tp2"),
        family=family,
        architecture="{}",
        stages=make_stages(config.block_specs(64), 1),
        seq_len=64,
        sequence_parallel=sequence_parallel,
    )

    def findings_of(comm: Comm) -> tuple[list[str], Findings]:
        example = image_example(1, config.model_dump()["image_size"]) if is_images else None
        with recorded("_run", trace) as runs, recorded("_trace", transform) as traces:
            weft.parallelize(
                meta_modules(lambda: folder.blocks(config)),
                plan,
                comm,
                axes=folder.AXES,
                ties=folder.ties(config),
                example=example,
            )
        (*_, findings) = traces[0]
        return names_of(runs), findings

    def rank(comm: Comm) -> tuple[tuple[list[str], Findings], tuple[list[str], Findings]]:
        if comm.rank:
            return ([], Findings()), ([], Findings())
        shared = findings_of(comm)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "fingerprint", lambda *_, **__: None)
            patch.setattr(chain, "fingerprint", lambda *_: None)
            return shared, findings_of(comm)

    (names, findings), (all_names, all_findings) = run_ranks("tp2", rank)[0]
    assert findings == all_findings
    num_kinds = math.ceil(len(all_names) / 2)
    assert len(names) <= num_kinds + 1
    assert set(names) < set(all_names)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_snapshot_makes_the_chain_that_it_was_taken_of(family: str) -> None:
    folder = FAMILIES[family]
    blocks = meta_modules(lambda: folder.blocks(folder.Config()))
    batch = image_example(1, 8) if family == "mnist" else token_example(1, 8)
    snapshot = ChainSnapshot.of(blocks, batch)
    made = snapshot.chain()
    again = ChainSnapshot.of(made.blocks, made.batch)
    assert again.fingerprint is not None
    assert snapshot.fingerprint is not None
    assert again.fingerprint.tensors == snapshot.fingerprint.tensors
    assert again.fingerprint.identities == snapshot.fingerprint.identities
    twice = again.chain()
    assert ChainSnapshot.of(twice.blocks, twice.batch) == again
    params = named_parameters(blocks)
    for name, param in named_parameters(made.blocks).items():
        assert param is not params[name]
        assert param.shape == params[name].shape
        assert param.dtype == params[name].dtype


def test_a_snapshot_keeps_what_is_one_object_and_holds_no_values() -> None:
    blocks = layers()
    blocks["layer1"] = blocks["layer0"]
    blocks["layer2"].up.weight = blocks["head"].proj.weight
    made = ChainSnapshot.of(blocks, token_example(1, 8)).chain().blocks
    assert made["layer1"] is made["layer0"]
    assert made["layer2"].up.weight is made["head"].proj.weight
    types = {param.device.type for param in named_parameters(made).values()}
    assert types == {"meta"}


def test_rank_threads_with_equal_models_share_one_trace() -> None:
    plan = plan_of("tp2", "dp2 tp2").model_copy(update={"zero": 0})

    def rank(comm: Comm) -> list[str]:
        blocks = layers(num=2)
        layer = blocks["layer1"]
        assert isinstance(layer, Layer)
        if comm.rank == 3:
            layer.options["gain"] = 2.0
        model = weft.parallelize(blocks, plan, comm, axes=AXES)
        return [name for name, shard in model.shards.items() if shard.reduce_axes]

    with recorded("_trace", transform) as traces:
        found = run_ranks("dp2 tp2", rank)
    assert len(traces) == 2
    assert found == [found[0]] * 4


def test_a_rank_that_fails_leaves_the_shared_computation_to_the_next_one() -> None:
    results = SharedResults()

    def fail() -> int:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        results.get("key", fail)
    assert results.get("key", lambda: 5) == 5
    assert results.get("key", fail) == 5
    assert results.get("other", lambda: 6) == 6
