"""Context parallelism: layouts with cp == one device, the sharding of a batch, undeclared attention rejected."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.matrix.layouts import Case, batches, check, shallow
from tests.sampling import sampled
from weft.comm.comm import Comm
from weft.config.changed_runs import in_float64
from weft.config.load import load
from weft.core.attention_mask import AttentionMask
from weft.core.sequence import Context
from weft.data.dataset import open_data
from weft.models import FAMILIES
from weft.models.common.attention import Attend, FusedAttention, set_implementations
from weft.models.common.attention_spec import AttentionSpec
from weft.models.common.batch import Batch
from weft.start.prove_run import prove_config
from weft.testing import run_ranks
from weft.train.build import build_data_loader, build_model

DENSE = (
    Case("cp2", family="gpt2", microbatches=2),
    Case("cp4", grouped=True, context="ulysses", documents=True, microbatches=2),
    Case("cp4", family="qwen2", context="ulysses", microbatches=2),  # 2 heads of keys for 4 ranks
    Case("cp3", context="allgather", documents=True, seq_len=12, microbatches=2),
    Case("cp2 tp2", family="gpt2", sequence=True, documents=True, microbatches=2),
    Case("pp2 cp2", grouped=True, documents=True, context="ulysses"),
    Case("dp2 cp2 tp2", sequence=True, context="allgather", microbatches=2),
    Case("cp2 dp2", zero=3, microbatches=2),
    Case(
        "pp2 dp2 cp2 tp2",
        sequence=True,
        documents=True,
        schedule="interleaved",
        chunks=2,
        microbatches=2,
    ),
    Case("pp2 cp2", schedule="zbv", chunks=2),
)
WINDOWS = (
    Case("cp2", family="mistral", documents=True, seq_len=16),
    Case("cp4", family="mistral", context="allgather", seq_len=16),
    Case("pp2 cp2", family="gemma3", context="allgather", documents=True, seq_len=16),
    Case("cp2 tp2", family="gemma3", sequence=True, seq_len=16),
)
MORE_WINDOWS = (
    Case("cp2 tp2", family="mistral", context="ulysses", sequence=True, seq_len=16),
    Case("cp2", family="mistral", context="ulysses", seq_len=16),
    Case("cp4", family="gemma3", seq_len=16),
)
CASES = [*(shallow(case) for case in DENSE), *WINDOWS]


@pytest.mark.parametrize("case", sampled(CASES), ids=str)
def test_layout_with_cp_computes_what_one_device_computes(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_WINDOWS, ids=str)
def test_more_windows_with_cp_compute_what_one_device_computes(case: Case) -> None:
    check(case)


@pytest.mark.slow
def test_layout_with_cp_in_processes_computes_what_one_device_computes() -> None:
    case = Case("cp2 tp2", sequence=True, grouped=True, microbatches=2)
    check(shallow(case), transport="processes")


def test_the_feed_gives_each_rank_its_columns_of_the_same_sequences() -> None:
    run = load(["--mesh", "dp2 cp2", "--data.seq_len", "8", "--batch.global_size", "8"], FAMILIES)
    samples = open_data(run.data, run.model)

    def rank(comm: Comm) -> list[Batch]:
        loader = build_data_loader(samples, comm, run.batch, seed=run.seed, later=False)
        return loader.batches(3)

    held = run_ranks("dp2 cp2", rank)
    alone = run_ranks("dp2", rank)
    for dp in range(2):
        for first, second, whole in zip(held[2 * dp], held[2 * dp + 1], alone[dp], strict=True):
            for name in ("inputs", "targets", "positions"):
                left = getattr(first, name)
                right = getattr(second, name)
                begin = left[:, :2]
                end = left[:, 2:]
                joined = torch.cat((begin, right, end), dim=1)
                assert joined.equal(getattr(whole, name))


def test_rows_of_a_cut_batch_keep_their_documents() -> None:
    whole = batches(Case("", documents=True))[0]
    cut_first = whole.columns(index=1, degree=2).rows(slice(1, 3))
    rows_first = whole.rows(slice(1, 3)).columns(index=1, degree=2)
    for name, value in vars(cut_first).items():
        other = getattr(rows_first, name)
        assert value is other is None or value.equal(other), name
    assert cut_first.whole_documents is not None


def test_every_attention_of_a_model_reaches_the_other_ranks() -> None:
    """A model that attends to its own columns only trains, and learns something else."""

    def implementations(comm: Comm) -> list[str]:
        case = Case("cp2")
        model = build_model(FAMILIES["llama3"], case.config, case.plan, comm, seed=5)
        attentions = [module for module in model.stages[0].modules() if isinstance(module, Attend)]
        return [attention.implementation.name for attention in attentions]

    assert run_ranks("cp2", implementations)[0] == ["ring"] * 5


class WindowAttend(Attend):
    """A subclass that computes something else, and does not say what."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        attend = Attend(mask=AttentionMask(window=3))
        return attend(q, k, v, batch)


@pytest.mark.parametrize("context", ["ring", "allgather", "ulysses"])
def test_a_subclass_of_attend_without_a_declaration_is_rejected(context: Context) -> None:
    """Before, ring and all-gather replaced it by full causal attention: other numbers, without a
    message.
    """

    def rank(comm: Comm) -> None:
        case = Case("cp2", context=context)
        blocks = FAMILIES["llama3"].blocks(case.config)
        blocks["layer0"].attn.attend = WindowAttend()
        weft.parallelize(blocks, case.plan, comm)

    name = {"ring": "ring", "allgather": "all-gather", "ulysses": "Ulysses"}[context]
    with pytest.raises(weft.WeftError) as caught:
        run_ranks("cp2", rank)
    assert (
        "layer0.attn.attend: WindowAttend overrides Attend.forward without declaring its requirements "
        f"(need `requirements` that {name} attention can compute). "
        "Fix: use Attend(mask=AttentionMask(...), scale=..., softcap=...) or define `requirements`"
    ) in str(caught.value)


class ComputedSinks(Attend):
    """Its sinks are computed from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(2))

    @property
    def requirements(self) -> AttentionSpec:
        return AttentionSpec(sinks=self.raw.exp())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return FusedAttention()(q, k, v, batch, self.requirements)


def test_declared_sinks_that_are_no_parameter_are_rejected() -> None:
    """Before, they became a parameter, which was trained in place of the one that they are of."""
    block = nn.ModuleDict({"attend": ComputedSinks()})
    with pytest.raises(weft.WeftError, match=r"layer0\.attend: declares sinks that are not its"):
        set_implementations(block, FusedAttention, name="layer0")
    assert [name for name, _ in block.named_parameters()] == ["attend.raw"]


def test_weft_prove_takes_a_config_with_cp() -> None:
    words = [
        "--mesh",
        "cp2 dp2",
        "--data.seq_len",
        "16",
        "--batch.global_size",
        "4",
        "--batch.micro_size",
        "1",
    ]
    words += ["--model.layers", "2", "--model.dim", "32", "--model.ffn", "32"]
    run = in_float64(load(words, FAMILIES))
    report = prove_config(run, steps=2, full=True)
    assert report.holds, report.to_json()


def test_ring_attention_is_public() -> None:
    assert weft.ring_attention.__module__ == "weft.parallel.context.ring"
