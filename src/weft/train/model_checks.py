"""Checks of a user's model before any rank starts: its axis table, state outside parameters, randomness, the loss, the layout.

The model runs on two short random sequences (or images) on one thread, in float64 where it can. It
must compute the same twice, change nothing but gradients, and its loss must be a sum over targets:
that of two sequences is the sum of those of each, and the loss of the columns of a sequence adds up,
too. Then each stage of the layout is made parallel on the meta device, where the transforms reject
what would compute other numbers.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.meta import MetaTransport
from weft.core.dimension import pipeline_axis
from weft.core.model_config import ModelConfig
from weft.errors import Fault, PlanError, type_and_message
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.batch import IGNORE, Batch, activation_of, chain, image_batch, token_batch
from weft.models.common.init import named_parameters, tie
from weft.models.user_facts import axes_faults
from weft.models.user_family import LOSS, UserFamily
from weft.parallel.model.fingerprint import Fingerprint, fingerprint
from weft.parallel.model.parallelize import parallelize
from weft.train.init_from import lazy_blocks

MOST_ENTRIES = 2**25
"""Larger models are not run by the checks: that would take seconds, and their memory twice."""
LENGTHS = (8, 16, 64)
"""Lengths of sequences that are tried before the configured one."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
SEED = 12345


def check_user_model(family: Family, config: ModelConfig, plan: Plan) -> None:
    """Reject a model that would compute other numbers on other layouts.

    Raises:
        PlanError: what is wrong, and where.
    """
    assert isinstance(family, UserFamily), "the model of a user"
    shapes = family.facts(config).shapes
    faults = tuple(axes_faults(shapes, family.axes(config)))
    if faults:
        raise PlanError(*faults)
    check_stage_outputs(family, plan)
    with _one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of trial runs; the ranks show theirs
        num_entries = sum(_numel(shape) for shape in shapes.values())
        if num_entries <= MOST_ENTRIES:
            _check_numbers(family, config, seq_len=plan.seq_len)
        check_layout(family, config, plan)


def check_stage_outputs(family: UserFamily, plan: Plan) -> None:
    """Reject a pipeline whose stages hand on several tensors.

    Raises:
        PlanError: the first block that does.
    """
    for stage in plan.stages[:-1]:
        if not stage.out:
            raise PlanError(
                Fault(
                    f"{family.model.label}: {stage.blocks[-1]}",
                    "hands on several tensors, and a pipeline stage sends one",
                    fix="concatenate them along the last dim, or a mesh without pp",
                )
            )


def check_layout(family: Family, config: ModelConfig, plan: Plan) -> None:
    """Make each pipeline stage of the layout parallel on the meta device.

    Raises:
        PlanError: a transform rejects the model.
    """
    if plan.mesh.size == 1:
        return
    axis = pipeline_axis()
    has_stages = plan.mesh.degree(axis) > 1
    for index in range(plan.mesh.degree(axis)):
        coordinate = dict.fromkeys((name for name, _ in plan.mesh.axes), 0)
        if has_stages:
            coordinate[axis] = index
        rank = plan.mesh.rank(**coordinate)
        comm = Comm(plan.mesh, rank, MetaTransport(plan.mesh.size, rank))
        parallelize(
            lazy_blocks(family, config),
            plan,
            comm,
            axes=family.axes(config),
            ties=family.ties(config),
            example=family.example(config, plan) if isinstance(family, UserFamily) else None,
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Without OpenMP: ranks may be forked from this process later."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


@dataclass(frozen=True)
class _Trial:
    """A model with values, and a batch that it can run on."""

    name: str
    blocks: dict[str, nn.Module]
    params: dict[str, nn.Parameter]
    batch: Batch
    dtype: torch.dtype

    def loss(self, batch: Batch) -> Tensor:
        """The summed loss, with extra losses."""
        out = chain(self.blocks, batch.inputs, batch)
        if out.loss is None:
            return out.x
        return out.x + out.loss

    def differs(self, got: Tensor, want: Tensor) -> bool:
        """Whether two numbers differ by more than rounding; NaN differs from everything."""
        wide_got = got.detach().double()
        wide_want = want.detach().double()
        error = (wide_got - wide_want).abs().max()
        scale = wide_want.abs().max().clamp(min=1.0)
        is_close = float(error / scale) <= TOLERANCES[self.dtype]
        return not is_close

    def row(self, number: int) -> Batch:
        """One of the two rows of the batch."""
        return self.batch.rows(slice(number, number + 1))


def _check_numbers(
    family: UserFamily,
    config: ModelConfig,
    *,
    seq_len: int,
) -> None:
    trial = _trial(family, config, seq_len=seq_len)
    loss = _check_pure(trial)
    _check_scalar(trial, loss)
    _check_gradients(trial, loss)
    whole = loss.detach()
    first = trial.loss(trial.row(0)).detach()
    second = trial.loss(trial.row(1)).detach()
    if trial.differs(whole, first + second):
        raise PlanError(_not_a_sum(trial, whole, first + second))
    if config.kind == "tokens":
        _check_columns(trial)


def _check_scalar(trial: _Trial, loss: Any) -> None:
    """The loss is one number."""
    got = type(loss).__name__
    if isinstance(loss, Tensor):
        got = f"shape {list(loss.shape)}"
        if loss.dim() == 0 and loss.is_floating_point():
            return
    raise PlanError(
        Fault(
            f"{trial.name}: the loss",
            "is no sum over targets",
            got=got,
            need="the sum over the targets of the batch, a scalar",
        )
    )


def _trial(
    family: UserFamily,
    config: ModelConfig,
    *,
    seq_len: int,
) -> _Trial:
    """The model in float64, else float32, on the shortest batch that it takes."""
    lengths = [length for length in LENGTHS if length < seq_len and seq_len % length == 0]
    lengths.append(seq_len)
    error: Exception | None = None
    for dtype, length in itertools.product(TOLERANCES, lengths):
        trial = _make_trial(family, config, length, dtype)
        try:
            with torch.no_grad():
                trial.loss(trial.batch)
        except Exception as failure:  # noqa: BLE001 - a user's forward may raise anything
            error = failure
        else:
            return _make_trial(family, config, length, dtype)
    assert error is not None, "at least one length is tried"
    what = f"its forward raises {type_and_message(error)}"
    raise PlanError(Fault(family.model.label, what)) from error


def _make_trial(
    family: UserFamily,
    config: ModelConfig,
    length: int,
    dtype: torch.dtype,
) -> _Trial:
    values = family.initial_values(config, seed=SEED)
    blocks = family.blocks(config)
    tie(blocks, family.ties(config))
    params: dict[str, nn.Parameter] = {}
    with torch.no_grad():
        for name, param in named_parameters(blocks).items():
            if name in values:
                param.copy_(values[name])
                params[name] = param
    for block in blocks.values():
        block.to(dtype)
    return _Trial(
        name=family.model.label,
        blocks=blocks,
        params=params,
        batch=_batch(config, length),
        dtype=dtype,
    )


def _batch(config: ModelConfig, length: int) -> Batch:
    """Two rows of random inputs; where they are tokens one target does not count."""
    generator = torch.Generator().manual_seed(SEED)
    if config.kind == "images":
        fields = config.model_dump()
        size = fields["image_size"]
        classes = fields["classes"]
        images = torch.randint(0, 256, (2, 1, size, size), generator=generator)
        targets_B = torch.randint(0, classes, (2,), generator=generator)
        return image_batch(images.to(torch.uint8), targets_B)
    vocab = config.axis_sizes()["vocab"]
    tokens_BS = torch.randint(0, vocab, (2, length + 1), generator=generator)
    inputs_BS = tokens_BS[:, :-1].contiguous()
    targets_BS = tokens_BS[:, 1:].clone()
    targets_BS[0, 0] = IGNORE
    return token_batch(inputs_BS, targets_BS)


def _check_pure(trial: _Trial) -> Tensor:
    """The loss of a forward that changes no state and draws no random numbers."""
    before = {name: _state(block) for name, block in trial.blocks.items()}
    random_state = torch.get_rng_state()
    loss = trial.loss(trial.batch)
    if not torch.equal(random_state, torch.get_rng_state()):
        torch.set_rng_state(random_state)
        what = "its forward draws random numbers, which differ between layouts"
        raise PlanError(
            Fault(
                trial.name,
                what,
                got=_dropout_of(trial.blocks),
                fix="drop-out of 0",
            )
        )
    for name, block in trial.blocks.items():
        changed = _changed(before[name], _state(block))
        if changed:
            what = "keeps state outside its parameters: its forward changes it"
            fix = "nn.LayerNorm or nn.GroupNorm in place of BatchNorm; no attributes set in forward"
            raise PlanError(
                Fault(
                    f"{trial.name}: {name}.{changed}",
                    what,
                    fix=fix,
                )
            )
    return loss


def _dropout_of(blocks: Mapping[str, nn.Module]) -> str:
    """The first module that drops activations."""
    for name, block in blocks.items():
        for path, module in block.named_modules():
            p = getattr(module, "p", None) or getattr(module, "dropout", None)
            if isinstance(p, float) and p > 0:
                place = f"{name}.{path}" if path else name
                return f"{place}: {type(module).__name__} with {p}"
    return ""


State = dict[str, Any]
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of every module that name its parts."""


def _state(block: nn.Module) -> State:
    """Path of each attribute of each module -> a value that changes with it."""
    found: State = {}
    for path, module in block.named_modules():
        prefix = f"{path}." if path else ""
        attributes = {**vars(module), **module._buffers}
        for name, value in attributes.items():
            is_of_torch = name in MODULE_TABLES or name.endswith("_hooks")
            if not is_of_torch:
                found[prefix + name] = _version(value)
    return found


def _version(value: Any) -> Any:
    """Equal before and after a forward that leaves the value as it is."""
    if isinstance(value, Tensor):
        return id(value), value._version
    found: Fingerprint | None = fingerprint(value, lambda tensor: (id(tensor), tensor._version))
    if found is None:
        return id(value)
    return found


def _changed(before: State, after: State) -> str:
    """Name of the first attribute that is new or has changed; empty if there is none."""
    for name, value in after.items():
        if name not in before or before[name] != value:
            return name
    return ""


def _check_gradients(trial: _Trial, loss: Tensor) -> None:
    """Every parameter takes part in the loss."""
    trained: dict[str, nn.Parameter] = {}
    for name, param in trial.params.items():
        if param.requires_grad:
            trained[name] = param
    for name, param in trained.items():
        _check_hooks(trial, name, param)
    try:
        grads = torch.autograd.grad(loss, tuple(trained.values()), allow_unused=True)
    except Exception as error:
        what = f"its backward raises {type_and_message(error)}"
        fix = ""
        if "use_reentrant" in str(error):
            what = "its backward recomputes activations by a nested backward"
            fix = "torch.utils.checkpoint with use_reentrant=False, or --parallel.recompute full"
        raise PlanError(Fault(trial.name, what, fix=fix)) from error
    for name, grad in zip(trained, grads, strict=True):
        if grad is None:
            raise PlanError(
                Fault(
                    f"{trial.name}: {name}",
                    "is a parameter that the loss does not use",
                    fix="remove it, or set requires_grad=False",
                )
            )


def _check_hooks(trial: _Trial, name: str, param: nn.Parameter) -> None:
    """The gradient is what the loss says: hooks of a parameter would run on gradients of a rank's
    shard, before they are summed.
    """
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise PlanError(
            Fault(
                f"{trial.name}: {name}",
                "has a gradient hook, which no layout would run on its whole gradient",
                fix='no hook: scale in the forward, or --optim.groups "PATTERN: lr_scale=2"',
            )
        )


def _not_a_sum(trial: _Trial, whole: Tensor, parts: Tensor) -> Fault:
    """Names the loss, or the first block that computes a sequence differently beside another one."""
    x: Any = trial.batch.inputs
    first: Any = x[:1]
    second: Any = x[1:]
    for name, block in trial.blocks.items():
        x = activation_of(block(x, trial.batch))
        first = activation_of(block(first, trial.row(0)))
        second = activation_of(block(second, trial.row(1)))
        has_rows = isinstance(x, Tensor) and x.dim() > 0
        is_plain = has_rows and x.shape[0] == 2
        if is_plain and name != LOSS and trial.differs(x, torch.cat([first, second])):
            return Fault(
                f"{trial.name}: {name}",
                "computes a sequence differently where another one is in the batch",
                fix="normalise each sequence by itself: nn.LayerNorm, nn.GroupNorm",
            )
    return Fault(
        f"{trial.name}: the loss",
        "is no sum over targets",
        got=f"{float(whole):.4f} for two sequences, {float(parts):.4f} for the sum of each",
        fix="reduction='sum', without dividing by a number of tokens",
    )


def _check_columns(trial: _Trial) -> None:
    """The loss of the halves of every sequence adds up to that of the whole ones."""
    *others, (_, loss_block) = trial.blocks.items()
    batch = trial.batch
    half = batch.inputs.shape[1] // 2
    if not half:
        return
    with torch.no_grad():
        x: Any = chain(dict(others), batch.inputs, batch).x  # a tuple, where a block returns one
        outputs = x if isinstance(x, tuple) else (x,)
        if not all(_has_columns(out, 2 * half) for out in outputs):
            return
        first = _loss_of_columns(loss_block, x, batch, slice(0, half))
        second = _loss_of_columns(loss_block, x, batch, slice(half, 2 * half))
        whole = activation_of(loss_block(x, batch))
    if trial.differs(whole, first + second):
        raise PlanError(_not_a_sum(trial, whole, first + second))


def _has_columns(out: Tensor, count: int) -> bool:
    return out.dim() > 1 and out.shape[1] == count


def _loss_of_columns(
    block: nn.Module,
    x: Any,
    batch: Batch,
    columns: slice,
) -> Tensor:
    def select(tensor: Tensor) -> Tensor:
        return tensor[:, columns]

    part: Any = select(x) if isinstance(x, Tensor) else tuple(map(select, x))
    loss: Tensor = activation_of(block(part, batch.map(select)))
    return loss
