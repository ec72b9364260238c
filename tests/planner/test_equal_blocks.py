"""Equal blocks of a chain that was built as a whole, as those of users' models are."""

from __future__ import annotations

from torch import nn

from weft.planner.measure.equal_blocks import equal_blocks


class Scaled(nn.Module):
    """A linear whose output is multiplied."""

    def __init__(self, factor: float, width: int = 4) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(4, width)


class OfFunction(nn.Module):
    """A module with a function as attribute."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function


def test_layers_of_one_class_and_size_are_equal() -> None:
    blocks = {f"layer{k}": Scaled(0.5) for k in range(3)}
    assert equal_blocks(blocks, distinct=()) == {"layer1": "layer0", "layer2": "layer0"}
    assert equal_blocks(blocks, distinct=("layer0",)) == {"layer2": "layer1"}


def test_other_attributes_shapes_or_training_are_not_equal() -> None:
    frozen = Scaled(0.5)
    frozen.linear.weight.requires_grad_(False)
    blocks = {"a": Scaled(0.5), "b": Scaled(0.25), "c": Scaled(0.5, width=8), "d": frozen}
    assert equal_blocks(blocks, distinct=()) == {}


def test_hooks_and_functions_equal_themselves_alone() -> None:
    hooked = Scaled(0.5)
    hooked.register_forward_hook(lambda *_: None)
    blocks = {"a": Scaled(0.5), "b": hooked}
    assert equal_blocks(blocks, distinct=()) == {}
    functions = {"a": OfFunction(lambda x: x), "b": OfFunction(lambda x: x), "c": OfFunction(abs)}
    functions["d"] = OfFunction(abs)
    assert equal_blocks(functions, distinct=()) == {"d": "c"}


def test_blocks_that_share_a_module_are_not_equal() -> None:
    shared = nn.Linear(4, 4)
    blocks = {"a": nn.Sequential(shared), "b": nn.Sequential(shared)}
    assert equal_blocks(blocks, distinct=()) == {}
