"""Which part of a block mixes tokens: the rest of the block then works on the columns of a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.parallel.context.probe_block import Activation, ProbeBlock
from weft.parallel.context.probe_columns import (
    MixesTokensError,
    ProbeSizes,
    check_close,
    columns_of,
    tolerance_of,
)
from weft.parallel.context.whole_sequences import (
    WHOLE_TRUNK,
    gatherable_parts,
    with_columns,
    with_inputs,
)


def part_that_mixes(probe: ProbeBlock, x: Activation, batch: Batch, sizes: ProbeSizes) -> str:
    """Path of the module of a block that alone must work on whole sequences; empty: none is enough.

    Each one that the block names is tried: with the whole sequences of its input in place of the
    columns of a rank, the block must compute the columns of its whole output.
    """
    if not isinstance(x, Tensor):
        return ""
    for path in gatherable_parts(probe.block):
        part = probe.block.get_submodule(path)
        if not _has_every_attend(part, probe.block):
            continue
        try:
            _compare(probe, part, x, batch, sizes)
        except (
            MixesTokensError,
            RuntimeError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
        ):  # it is called in another way
            continue
        return path
    return ""


def _has_every_attend(part: nn.Module, block: nn.Module) -> bool:
    """Whether no attention is outside of the part: it would read the batch of whole sequences."""
    return _attends(block.modules()) <= _attends(part.modules())


def _attends(modules: Iterable[nn.Module]) -> set[nn.Module]:
    return {module for module in modules if isinstance(module, Attend)}


def _compare(
    probe: ProbeBlock, part: nn.Module, x: Tensor, batch: Batch, sizes: ProbeSizes
) -> None:
    inputs: list[Tensor] = []
    tolerance = tolerance_of(probe)

    def note(x: Tensor) -> Tensor:
        inputs.append(x)
        return x

    def record(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        with_inputs(args, options, note)

    with ExitStack() as hooks:
        hooks.callback(part.register_forward_pre_hook(record, with_kwargs=True).remove)
        whole = probe.run(x, batch)
    if not inputs or not isinstance(whole, Tensor):
        raise MixesTokensError("does not run the part")
    for index in range(sizes.degree):
        own_x, own_batch = columns_of(x, batch, index, sizes.degree)
        columns = own_batch.positions[0].to(whole.device)
        known = iter(inputs)

        def gathered(own: Tensor, known: Iterator[Tensor] = known, at: Tensor = columns) -> Tensor:
            x = next(known)
            check_close(own, x[:, at], whole=x, tolerance=tolerance)
            return x

        def gather(
            _: nn.Module,
            args: tuple[Any, ...],
            options: dict[str, Any],
            act: Callable[[Tensor], Tensor] = gathered,
        ) -> Any:
            return with_inputs(args, options, act)

        def split(_: nn.Module, _args: Any, out: Any, at: Tensor = columns) -> Any:
            return with_columns(out, lambda x: x[:, at])

        with ExitStack() as hooks:
            setattr(probe.block, WHOLE_TRUNK, True)
            hooks.callback(setattr, probe.block, WHOLE_TRUNK, False)
            pre = part.register_forward_pre_hook(gather, with_kwargs=True, prepend=True)
            hooks.callback(pre.remove)
            hooks.callback(part.register_forward_hook(split).remove)
            own = probe.run(own_x, batch)
        assert isinstance(own, Tensor), "as the whole output"
        check_close(own, whole[:, columns], whole=whole, tolerance=tolerance)
