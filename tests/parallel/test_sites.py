"""Training across sites equals a plain program of the same algorithm: layouts inside a site, wire types, delays, resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.saving import save
from tests.parallel.plain_sites import PlainRun, train_plain
from weft.checkpoint.read import open_checkpoint
from weft.comm.comm import Comm
from weft.comm.transport import MetaTransport
from weft.config.load import try_load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run
from weft.core.axes import Box
from weft.core.mesh import Mesh
from weft.data.dataset import open_data
from weft.errors import PlanError
from weft.models import FAMILIES
from weft.parallel.pipeline.module import PipelineParallel
from weft.testing import run_ranks
from weft.train.build import build_data_loader
from weft.train.build_training import build_step
from weft.train.digest import StateDigests, StateFault
from weft.train.step import StepReport

TOLERANCE = 1e-9
FLOAT64 = (
    *("--precision.params", "float64", "--precision.compute", "float64"),
    *("--precision.reduce", "float64"),
)
SIZES = (
    *("--model.layers", "2", "--model.dim", "16", "--model.heads", "2"),
    *("--data.seq_len", "8", "--batch.micro_size", "1"),
    *("--batch.global_size", "12", "--optim.warmup", "0", "--optim.decay", "constant"),
)
SITE = ("--site.every", "3", "--site.lr", "0.7")


def run_of(mesh: str, *words: str) -> Run:
    if "--model.name" not in words:
        words = (*words, "--model.kv_heads", "2", "--model.ffn", "32")
    loaded = try_load(["--mesh", mesh, *SIZES, *FLOAT64, *SITE, *words], FAMILIES)
    assert not run_checks(loaded.run, config_checks, known=loaded.faults)
    return loaded.run


def train_ranks(
    run: Run, *, steps: range, saved: Path | None = None, start: Path | None = None
) -> list[StepReport]:
    """The reports of rank 0 of the steps; saved behind the last one."""
    samples = open_data(run.data, run.model)

    def rank(comm: Comm) -> list[StepReport]:
        step = build_step(run, comm)
        if start is not None:
            step.restore(open_checkpoint(start))
        loader = build_data_loader(samples, comm, run.batch, seed=run.seed, later=False)
        reports = [step(loader.batches(index), lr=run.optim.lr) for index in steps]
        if saved is not None:
            save(step, saved, run, done=steps.stop)
        step.finish()
        return reports

    return run_ranks(run.device_mesh, rank)[0]


def stored(path: Path, section: str) -> dict[str, Tensor]:
    source = open_checkpoint(path).section(section)
    tensors = {}
    for name, shape in source.shapes.items():
        tensors[name] = source.read(name, Box.whole(shape))
    return tensors


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Of the tensors of `left`: biases of routers have no momentum."""
    errors = []
    for name, tensor in left.items():
        errors.append((tensor - right[name]).abs().max())
    return float(max(errors))


def assert_equals_plain(run: Run, path: Path, reports: Sequence[StepReport]) -> PlainRun:
    """Outer parameters, momentum, parameters of each site, losses and norms are those of the plain
    program.
    """
    num_sites = run.device_mesh.degree("site")
    samples = open_data(run.data, run.model)
    plain = train_plain(run, samples, num_sites=num_sites, num_steps=len(reports))
    assert stored(path, "model").keys() == plain.outer.keys()
    assert largest_difference(stored(path, "model"), plain.outer) < TOLERANCE
    if run.site.momentum:
        assert largest_difference(stored(path, "site/momentum"), plain.momentum) < TOLERANCE
    for index, params in enumerate(plain.sites):
        left = stored(path, f"site/{index}/model")
        assert largest_difference(left, params) < TOLERANCE
    loss = [report.loss for report in reports]
    assert loss == pytest.approx(plain.losses, abs=TOLERANCE)
    grad_norms = [report.grad_norm for report in reports]
    assert grad_norms == pytest.approx(plain.norms, abs=TOLERANCE)
    return plain


LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "int8 over sharded rows": ("site2 dp2 tp2", ("--site.wire", "int8", "--parallel.zero", "2")),
    "bfloat16 delayed": ("site3 dp2", ("--site.wire", "bfloat16", "--site.overlap", "2")),
}
EXPERTS = (
    *("--model.experts", "4", "--model.top_k", "2", "--model.expert_ffn", "8"),
    *("--model.balance_loss", "0", "--model.balance_rate", "0"),
)
SLOW_LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "one site": ("site1", ()),
    "two sites": ("site2", ()),
    "data ranks": ("site2 dp2", ()),
    "zero1": ("site2 dp2", ("--parallel.zero", "1")),
    "pipeline and tensor": ("site2 pp2 tp2", ()),
    "three sites zero3": ("site3 dp2", ("--parallel.zero", "3")),
    "context": ("site2 cp2", ("--site.wire", "int8")),
    "sequence parallel": ("site2 tp2", ("--parallel.sequence", "True", "--site.overlap", "1")),
    "tied over the pipeline": (
        "site2 pp2 dp2",
        ("--model.name", "gpt2", "--site.wire", "int8", "--parallel.zero", "1"),
    ),
    "zero2 delayed": (
        "site2 dp3",
        ("--parallel.zero", "2", "--site.overlap", "1", "--site.mix", "0.25"),
    ),
    "experts": ("site2 ep2", ("--model.name", "deepseek", *EXPERTS)),
    "no momentum": ("site2 dp2", ("--site.momentum", "0.0", "--site.every", "1")),
    "pipeline int8 delayed": ("site2 pp2", ("--site.wire", "int8", "--site.overlap", "2")),
}


def check_layout(mesh: str, words: tuple[str, ...], folder: Path) -> None:
    run = run_of(mesh, *words)
    path = folder / "step"
    reports = train_ranks(run, steps=range(7), saved=path)
    assert_equals_plain(run, path, reports)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sites_equal_a_plain_program_of_the_same_algorithm(layout: str, tmp_path: Path) -> None:
    mesh, words = LAYOUTS[layout]
    check_layout(mesh, words, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW_LAYOUTS)
def test_sites_of_further_layouts_equal_a_plain_program(layout: str, tmp_path: Path) -> None:
    mesh, words = SLOW_LAYOUTS[layout]
    check_layout(mesh, words, tmp_path)


def state_of(path: Path) -> dict[str, Any]:
    found = {}
    manifest = open_checkpoint(path).manifest
    for section in manifest.sections:
        for name, tensor in stored(path, section).items():
            found[f"{section}/{name}"] = tensor
    return found


@pytest.mark.parametrize(
    "words",
    [pytest.param((), marks=pytest.mark.slow), ("--site.wire", "int8", "--site.overlap", "2")],
)
def test_a_resumed_run_has_the_same_bits_also_with_an_exchange_under_way(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    run = run_of("site2 dp2", *words)
    whole = tmp_path / "whole"
    first = tmp_path / "first"
    second = tmp_path / "second"
    train_ranks(run, steps=range(8), saved=whole)
    train_ranks(run, steps=range(4), saved=first)  # step 3 began an exchange
    train_ranks(run, steps=range(4, 8), saved=second, start=first)
    left = state_of(whole)
    right = state_of(second)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name])
    has_exchange = any(name.startswith("site/exchange/") for name in state_of(first))
    assert has_exchange == bool(words)


def test_sites_leave_and_return(tmp_path: Path) -> None:
    """A site that stays goes on from its own state, a new one from the outer parameters."""
    two = tmp_path / "two"
    one = tmp_path / "one"
    train_ranks(run_of("site2"), steps=range(4), saved=two)
    train_ranks(run_of("site1"), steps=range(4, 4), saved=one, start=two)
    before = state_of(two)
    after = state_of(one)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name])
    back = tmp_path / "back"
    train_ranks(run_of("site3"), steps=range(4, 4), saved=back, start=one)
    returned = state_of(back)
    for name, outer in stored(two, "model").items():
        assert torch.equal(returned[f"site/2/model/{name}"], outer)
        moments = after[f"site/0/optim/exp_avg/{name}"]
        assert torch.equal(returned[f"site/2/optim/exp_avg/{name}"], moments)
        assert torch.equal(returned[f"site/momentum/{name}"], before[f"site/momentum/{name}"])


@pytest.mark.slow
def test_a_run_without_sites_takes_the_outer_parameters_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    sites = tmp_path / "sites"
    plain = tmp_path / "plain"
    again = tmp_path / "again"
    train_ranks(run_of("site2"), steps=range(4), saved=sites)
    without = run_of("site2").with_values({"mesh": "dp2"})
    train_ranks(without, steps=range(4, 4), saved=plain, start=sites)
    for name, outer in stored(sites, "model").items():
        assert torch.equal(stored(plain, "model")[name], outer)
    train_ranks(run_of("site2"), steps=range(4, 4), saved=again, start=plain)
    for name, values in stored(plain, "model").items():
        assert torch.equal(stored(again, "model")[name], values)
        assert not stored(again, "site/momentum")[name].any()


@pytest.mark.slow
def test_digests_compare_replicas_inside_sites_and_outer_parameters_between_them() -> None:
    run = run_of("site2 dp2", "--site.overlap", "1", "--site.wire", "int8")
    samples = open_data(run.data, run.model)

    def rank(comm: Comm) -> tuple[list[object], object]:
        step = build_step(run, comm)
        digests = StateDigests(step.state(), every=1)
        loader = build_data_loader(samples, comm, run.batch, seed=run.seed, later=False)
        found: list[object] = []
        for index in range(5):
            step(loader.batches(index), lr=1e-3, status=lambda: int(digests.has_changed()))
            found.append(digests.compare(index + 1))
        if comm.rank == 3:
            assert step.local_updates is not None
            step.local_updates.outer.params[0] += 1
        return found, digests.compare(5)

    for found, fault in run_ranks(run.device_mesh, rank):
        assert found == [None] * 5
        assert isinstance(fault, StateFault)
        assert 3 in fault.ranks


@pytest.mark.slow
def test_every_site_skips_a_step_that_is_not_finite_on_one() -> None:
    run = run_of("site2")
    samples = open_data(run.data, run.model)

    def rank(comm: Comm) -> list[bool]:
        step = build_step(run, comm)
        loader = build_data_loader(samples, comm, run.batch, seed=run.seed, later=False)
        skipped = []
        for index in range(4):
            if comm.rank == 1:
                norm = step.model.params["head.norm.weight"]
                kept = norm.detach().clone()
                if index == 1:
                    norm.data.fill_(torch.nan)
            report = step(loader.batches(index), lr=1e-3, on_nonfinite="skip")
            if comm.rank == 1 and index == 1:
                norm.data.copy_(kept)
            skipped.append(report.skipped)
        return skipped

    assert run_ranks(run.device_mesh, rank) == [[False, True, False, False]] * 2


def test_a_pipeline_of_a_script_rejects_replicas_that_nothing_joins() -> None:
    comm = Comm(Mesh.parse("site2"), 0, MetaTransport(2, 0))
    with pytest.raises(PlanError, match="replicas along site train apart"):
        PipelineParallel(
            [], comm, loss=torch.nn.functional.mse_loss, example=torch.zeros(1), microbatches=1
        )
