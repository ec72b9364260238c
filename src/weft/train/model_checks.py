"""Checks of a user's model before any rank starts: its axis table, state outside parameters, randomness, the loss, the layout.

The model runs on two short random sequences (or images) on one thread, in float64 where it can. It
must compute the same twice, change nothing but gradients, and its loss must be a sum over targets:
that of two sequences is the sum of those of each, and the loss of the columns of a sequence adds up,
too. Then each stage of the layout is made parallel on the meta device, where the transforms reject
what would compute other numbers.
"""

from __future__ import annotations

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
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.batch import IGNORE, Batch, Extra, chain, image_batch, token_batch
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
    faults = tuple(axes_faults(family.facts(config).shapes, family.axes(config)))
    if faults:
        raise PlanError(*faults)
    with _one_thread():
        num_entries = sum(_numel(shape) for shape in family.facts(config).shapes.values())
        if num_entries <= MOST_ENTRIES:
            _check_numbers(family, config, seq_len=plan.seq_len)
        check_layout(family, config, plan)


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
        return out.x if out.loss is None else out.x + out.loss

    def differs(self, got: Tensor, want: Tensor) -> bool:
        """Whether two numbers differ by more than rounding."""
        error = (got.detach().double() - want.detach().double()).abs().max()
        scale = want.detach().double().abs().max().clamp(min=1.0)
        return not float(error / scale) <= TOLERANCES[self.dtype]


def _check_numbers(family: UserFamily, config: ModelConfig, *, seq_len: int) -> None:
    name = family.model.label
    trial = _trial(family, config, seq_len=seq_len)
    loss = _check_pure(trial)
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        need = "the sum over the targets of the batch, a scalar"
        raise PlanError(Fault(f"{name}: the loss", "is no sum over targets", got=got, need=need))
    _check_gradients(trial, loss)
    rows = [trial.loss(trial.batch.rows(slice(place, place + 1))).detach() for place in range(2)]
    if trial.differs(loss.detach(), rows[0] + rows[1]):
        raise PlanError(_not_a_sum(trial, loss.detach(), rows[0] + rows[1]))
    if config.kind == "tokens":
        _check_columns(trial)


def _trial(family: UserFamily, config: ModelConfig, *, seq_len: int) -> _Trial:
    """The model in float64, else float32, on the shortest batch that it takes."""
    lengths = [length for length in LENGTHS if length < seq_len and seq_len % length == 0]
    error: Exception | None = None
    for dtype in TOLERANCES:
        for length in (*lengths, seq_len):
            trial = _make_trial(family, config, length, dtype)
            try:
                with torch.no_grad():
                    trial.loss(trial.batch)
                return _make_trial(family, config, length, dtype)
            except Exception as failure:  # noqa: BLE001 - a user's forward may raise anything
                error = failure
    first_line = str(error).partition("\n")[0]
    what = f"its forward raises {type(error).__name__}: {first_line}"
    raise PlanError(Fault(family.model.label, what)) from error


def _make_trial(family: UserFamily, config: ModelConfig, length: int, dtype: torch.dtype) -> _Trial:
    values = family.initial_values(config, seed=SEED)
    blocks = family.blocks(config)
    tie(blocks, family.ties(config))
    params = {name: param for name, param in named_parameters(blocks).items() if name in values}
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(values[name])
    for block in blocks.values():
        block.to(dtype)
    return _Trial(family.model.label, blocks, params, _batch(config, length), dtype)


def _batch(config: ModelConfig, length: int) -> Batch:
    """Two rows of random inputs; where they are tokens one target does not count."""
    generator = torch.Generator().manual_seed(SEED)
    if config.kind == "images":
        fields = config.model_dump()
        size, classes = fields["image_size"], fields["classes"]
        images = torch.randint(0, 256, (2, 1, size, size), generator=generator)
        targets_B = torch.randint(0, classes, (2,), generator=generator)
        return image_batch(images.to(torch.uint8), targets_B)
    vocab = config.axis_sizes()["vocab"]
    tokens_BS = torch.randint(0, vocab, (2, length + 1), generator=generator)
    targets_BS = tokens_BS[:, 1:].clone()
    targets_BS[0, 0] = IGNORE
    return token_batch(tokens_BS[:, :-1].contiguous(), targets_BS)


def _check_pure(trial: _Trial) -> Tensor:
    """The loss of a forward that changes no state and draws no random numbers."""
    before = {name: _state(block) for name, block in trial.blocks.items()}
    random_state = torch.get_rng_state()
    loss = trial.loss(trial.batch)
    if not torch.equal(random_state, torch.get_rng_state()):
        torch.set_rng_state(random_state)
        what = "its forward draws random numbers, which differ between layouts"
        raise PlanError(Fault(trial.name, what, got=_dropout_of(trial.blocks), fix="drop-out of 0"))
    for name, block in trial.blocks.items():
        changed = _changed(before[name], _state(block))
        if changed:
            what = "keeps state outside its parameters: its forward changes it"
            fix = "nn.LayerNorm or nn.GroupNorm in place of BatchNorm; no attributes set in forward"
            raise PlanError(Fault(f"{trial.name}: {name}.{changed}", what, fix=fix))
    return loss


def _dropout_of(blocks: Mapping[str, nn.Module]) -> str:
    """The first module that drops activations."""
    for name, block in blocks.items():
        for path, module in block.named_modules():
            p = getattr(module, "p", None) or getattr(module, "dropout", None)
            if isinstance(p, float) and p > 0:
                return f"{name}.{path}: {type(module).__name__} with {p}".replace(".:", ":")
    return ""


State = dict[str, Any]


def _state(block: nn.Module) -> State:
    """Path of each attribute of each module -> a value that changes with it."""
    found: State = {}
    for path, module in block.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if name not in ("_parameters", "_buffers", "_modules") and not name.endswith("_hooks"):
                found[prefix + name] = _version(value)
    return found


def _version(value: Any) -> Any:
    """Equal before and after a forward that leaves the value as it is."""
    if isinstance(value, Tensor):
        return id(value), value._version
    found: Fingerprint | None = fingerprint(value, lambda tensor: (id(tensor), tensor._version))
    return id(value) if found is None else found


def _changed(before: State, after: State) -> str:
    """Name of the first attribute that is new or has changed; empty if there is none."""
    for name, value in after.items():
        if name not in before or before[name] != value:
            return name
    return ""


def _check_gradients(trial: _Trial, loss: Tensor) -> None:
    """Every parameter takes part in the loss."""
    params = [param for param in trial.params.values() if param.requires_grad]
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    owners = {id(param): name for name, param in reversed(trial.params.items())}
    unused = [owners[id(param)] for param, grad in zip(params, grads, strict=True) if grad is None]
    if unused:
        fix = "remove it, or set requires_grad=False"
        what = "is a parameter that the loss does not use"
        raise PlanError(Fault(f"{trial.name}: {unused[0]}", what, fix=fix))


def _not_a_sum(trial: _Trial, whole: Tensor, parts: Tensor) -> Fault:
    """Names the loss, or the first block that computes a sequence differently beside another one."""
    x: Any = trial.batch.inputs
    singles: list[Any] = [x[:1], x[1:]]
    for name, block in trial.blocks.items():
        batches = [trial.batch.rows(slice(place, place + 1)) for place in range(2)]
        out = block(x, trial.batch)
        x = out.x if isinstance(out, Extra) else out
        parts_out = [block(one, batch) for one, batch in zip(singles, batches, strict=True)]
        singles = [one.x if isinstance(one, Extra) else one for one in parts_out]
        is_plain = isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == 2
        if is_plain and name != LOSS and trial.differs(x, torch.cat(singles)):
            what = "computes a sequence differently where another one is in the batch"
            fix = "normalise each sequence by itself: nn.LayerNorm, nn.GroupNorm"
            return Fault(f"{trial.name}: {name}", what, fix=fix)
    got = f"{float(whole):.4f} for two sequences, {float(parts):.4f} for the sum of each"
    fix = "reduction='sum', without dividing by a number of tokens"
    return Fault(f"{trial.name}: the loss", "is no sum over targets", got=got, fix=fix)


def _check_columns(trial: _Trial) -> None:
    """The loss of the halves of every sequence adds up to that of the whole ones."""
    *others, (_, loss_block) = trial.blocks.items()
    batch = trial.batch
    with torch.no_grad():
        x: Any = chain(dict(others), batch.inputs, batch).x  # a tuple, where a block returns one
        half = batch.inputs.shape[1] // 2
        outputs = x if isinstance(x, tuple) else (x,)
        has_columns = all(out.dim() > 1 and out.shape[1] == 2 * half for out in outputs)
        if not half or not has_columns:
            return
        parts = [
            _loss_of_columns(loss_block, x, batch, slice(start, start + half))
            for start in (0, half)
        ]
        whole = _scalar(loss_block(x, batch))
    if trial.differs(whole, parts[0] + parts[1]):
        raise PlanError(_not_a_sum(trial, whole, parts[0] + parts[1]))


def _loss_of_columns(block: nn.Module, x: Any, batch: Batch, columns: slice) -> Tensor:
    def select(tensor: Tensor) -> Tensor:
        return tensor[:, columns]

    part = tuple(map(select, x)) if isinstance(x, tuple) else select(x)
    return _scalar(block(part, batch.map(select)))


def _scalar(out: Any) -> Tensor:
    found: Tensor = out.x if isinstance(out, Extra) else out
    return found
