"""Memory table: bytes that a rank holds between steps under ZeRO 0 to 3, in real processes; bytes of a layer's activations.

.venv/bin/python benchmarks/memory.py          # about a minute; docs/memory.md has what it printed
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from tests.live import Live
from weft.comm.comm import Comm
from weft.config.schema import OptimConfig
from weft.core.mesh import Mesh
from weft.layout.plan import Plan, Recompute, canonical_json, make_stages
from weft.models import FAMILIES
from weft.models.common.batch import Batch, token_batch
from weft.testing import run_ranks
from weft.train.build import build_model
from weft.train.optim import make_optimizer, matrices
from weft.train.step import TrainStep

SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SETTLE_S, SETTLE_READINGS = 0.6, 6
POLICIES = {
    "mixed": ("float32", "bfloat16", "float32"),
    "mixed, bfloat16 sums": ("float32", "bfloat16", "bfloat16"),
    "float32": ("float32", "float32", "float32"),
}


@dataclass(frozen=True)
class Setting:
    """A ZeRO stage under three dtypes on d ranks."""

    zero: Literal[0, 1, 2, 3]
    params: str
    compute: str
    reduce: str
    degree: int

    def theory(self) -> float:
        """Bytes a parameter: values in `compute`, gradients in `reduce`, and what the optimizer moves, has and remembers.

        p, c, r bytes of params, compute, reduce; g = what a finished gradient takes beside r, 0 where it lies there

        0  c + r + g + (p + 2p)         1  c + r + (g + p + 2p)/d
        2  c + (p + p + 2p)/d           3  (p + p + 2p)/d            p of values is no extra where p = c, but in 3
        """
        p, c, r, d = SIZE[self.params], SIZE[self.compute], SIZE[self.reduce], self.degree
        own = 0 if self.params == self.compute else p
        g = 0 if self.params == self.reduce else p
        if self.zero == 0:
            return c + r + g + own + 2 * p
        if self.zero == 1:
            return c + r + (g + own + 2 * p) / d
        return c + (p + own + 2 * p) / d if self.zero == 2 else 4 * p / d


@dataclass(frozen=True)
class Measured:
    """What one rank held between steps, bytes."""

    params: int
    tensors: int
    resident: int


def plan_of(mesh: str, fields: Mapping[str, Any], *, seq_len: int, **more: Any) -> Plan:
    """A plan of a small LLaMA."""
    config = FAMILIES["llama3"].Config(**fields)
    return Plan(
        mesh=Mesh.parse(mesh),
        family="llama3",
        architecture=canonical_json(config.model_dump()),
        stages=make_stages(config.block_specs(seq_len), 1),
        seq_len=seq_len,
        **more,
    )


def live_bytes() -> int:
    """Bytes of the storages of all tensors of this process, each once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def settled(read: Callable[[], int]) -> int:
    """The least of readings over a short while: what is held, without what is being let go.

    The backend's own threads keep the tensors of a call for a moment after they have said that it is done, and a rank
    that is ahead still has messages on the way.
    """
    readings = []
    for _ in range(SETTLE_READINGS):
        readings.append(read())
        time.sleep(SETTLE_S / SETTLE_READINGS)
    return min(readings)


@dataclass(frozen=True)
class MeasureStates:
    """What every rank does for a setting; a value, so that it can be sent to processes."""

    setting: Setting
    fields: tuple[tuple[str, Any], ...]

    def __call__(self, comm: Comm) -> Measured:
        setting, family, fields = self.setting, FAMILIES["llama3"], dict(self.fields)
        dtypes = {"params": setting.params, "compute": setting.compute, "reduce": setting.reduce}
        plan = plan_of(comm.mesh.text, fields, seq_len=16, zero=setting.zero, bucket_bytes=2**40, **dtypes)
        before, resident = live_bytes(), psutil.Process().memory_info().rss
        model = build_model(family, family.Config(**fields), plan, comm, seed=1)
        decayed = matrices(model.params)
        num_params = sum(piece.box.size for piece in model.shards.values())

        def optimizer(tensors: Mapping[str, Tensor]) -> Any:
            return make_optimizer(tensors, OptimConfig(), decay_names=decayed)

        step = TrainStep(model, make_optimizer=optimizer, clip=1.0)
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        batch = token_batch(tokens, tokens)
        for _ in range(2):
            step([batch], lr=1e-3)
        given = sum(x.untyped_storage().nbytes() for x in (tokens, batch.positions))
        return Measured(num_params, settled(live_bytes) - before - given, psutil.Process().memory_info().rss - resident)


def states(setting: Setting, fields: Mapping[str, Any]) -> Measured:
    """The largest rank of a run in processes."""
    ranks = run_ranks(f"dp{setting.degree}", MeasureStates(setting, tuple(fields.items())), transport="processes")
    return max(ranks, key=lambda each: each.tensors)


@dataclass(frozen=True)
class MeasureLayer:
    """Bytes that one layer keeps between its forward and its backward, on this rank; parameters, input and output apart."""

    recompute: Recompute
    fields: tuple[tuple[str, Any], ...]
    seq_len: int

    def __call__(self, comm: Comm) -> int:
        family, fields = FAMILIES["llama3"], dict(self.fields)
        plan = plan_of(comm.mesh.text, fields, seq_len=self.seq_len, recompute=self.recompute)
        model = build_model(family, family.Config(**fields), plan, comm, seed=1)
        whole = token_batch(*(torch.zeros(1, self.seq_len, dtype=torch.int64) for _ in range(2)))
        batch: Batch = whole.columns(index=comm.index("cp"), degree=comm.degree("cp"))
        x = torch.randn(*batch.inputs.shape, fields["dim"]).requires_grad_()
        block = model.blocks["layer0"]
        with Live() as live:
            y = block(x, batch)
        kept = settled(lambda: live.num_bytes(but=(x, y, batch.positions, *block.parameters())))
        y.sum().backward()  # ring attention's messages come to an end on every rank
        return kept


def layer_theory(recompute: Recompute, fields: Mapping[str, Any], tokens: int) -> int:
    """Bytes in float32; tests/parallel/test_recompute.py holds it exact on one rank."""
    width, heads, kv, ffn = fields["dim"], fields["heads"], fields["kv_heads"], fields["ffn"]
    size = width // heads
    selective = width + (heads * size + 2 * kv * size) + heads * size + 2 * ffn + heads + size
    whole = selective + 4 * width + 2 * ffn + 2
    return 4 * tokens * {"none": whole, "selective": selective, "full": 0}[recompute]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256, help="width of the model whose states are measured")
    dim = parser.parse_args().dim
    fields = {"layers": 6, "dim": dim, "heads": 8, "kv_heads": 8, "ffn": 3 * dim, "vocab": 256}
    print("| types | zero | ranks | theory, bytes a parameter | measured | difference | tensors, MB | resident, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (params, compute, reduce) in POLICIES.items():
        for zero in (0, 1, 2, 3):
            for degree in (2, 4):
                setting = Setting(zero, params, compute, reduce, degree)  # type: ignore[arg-type]
                found = states(setting, fields)
                each = found.tensors / found.params
                away = f"{100 * (each / setting.theory() - 1):+.2f}%"
                numbers = f"{found.tensors / 1e6:.1f} | {found.resident / 1e6:.1f}"
                print(f"| {name} | {zero} | dp{degree} | {setting.theory():.2f} | {each:.2f} | {away} | {numbers} |")
    layer = {"layers": 1, "dim": 256, "heads": 8, "kv_heads": 4, "ffn": 704}
    print("\n| recompute | ranks | formula, KB a layer | measured |\n|---|---|---|---|")
    for recompute in ("none", "selective", "full"):
        for mesh, cp in (("", 1), ("cp2", 2), ("cp4", 4)):
            kept = max(run_ranks(mesh, MeasureLayer(recompute, tuple(layer.items()), 512)))  # type: ignore[arg-type]
            right = layer_theory(recompute, layer, 512 // cp)  # type: ignore[arg-type]
            print(f"| {recompute} | {mesh or 'one'} | {right / 1e3:.1f} | {kept / 1e3:.1f} |")


if __name__ == "__main__":
    main()
