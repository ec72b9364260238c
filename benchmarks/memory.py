"""Memory tables: bytes that a rank holds between steps under ZeRO 0 to 3, in processes; activation bytes of a layer.

.venv/bin/python -m benchmarks.memory   # about a minute; docs/memory.md has its output
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor

from tests.live import Live
from weft.comm.comm import Comm
from weft.comm.shared_memory import segment_bytes
from weft.config.schema import OptimConfig
from weft.core.mesh import Mesh
from weft.layout.plan import Plan, Recompute, canonical_json, make_stages
from weft.models import FAMILIES
from weft.models.common.batch import Batch, token_batch
from weft.models.common.rope import Rope
from weft.testing import run_ranks
from weft.train.build import build_model
from weft.train.optim import make_optimizer, matrices
from weft.train.step import TrainStep

ZeroStage = Literal[0, 1, 2, 3]

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SETTLE_S = 0.6
SETTLE_READINGS = 6
STATE_SEQ_LEN = 16
LAYER_SEQ_LEN = 512
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "selective", "full")
CP_DEGREES = (1, 2, 4)
LAYER = {"layers": 1, "dim": 256, "heads": 8, "kv_heads": 4, "ffn": 704}


class PrecisionPolicy(NamedTuple):
    """Dtypes of master parameters, of values and activations, and of gradient sums."""

    params: str
    compute: str
    reduce: str


POLICIES = {
    "mixed": PrecisionPolicy("float32", "bfloat16", "float32"),
    "mixed, bfloat16 sums": PrecisionPolicy("float32", "bfloat16", "bfloat16"),
    "float32": PrecisionPolicy("float32", "float32", "float32"),
}


@dataclass(frozen=True)
class Setting:
    """A ZeRO stage under a precision policy on `degree` data-parallel ranks."""

    zero: ZeroStage
    policy: PrecisionPolicy
    degree: int

    def predicted_bytes(self) -> float:
        """Predicted bytes a parameter: values in `compute`, gradients in `reduce`, optimizer copy, gradient and states.

        p, c, r: bytes of params, compute, reduce; d: degree. Of the terms below g (the finished gradient) is 0 where p = r,
        and the first p (the optimizer's copy of the values) is 0 where p = c, except under stage 3.

            0  c + r + g + (p + 2p)         1  c + r + (g + p + 2p)/d
            2  c + (p + p + 2p)/d           3  (p + p + 2p)/d
        """
        p = ITEM_BYTES[self.policy.params]
        c = ITEM_BYTES[self.policy.compute]
        r = ITEM_BYTES[self.policy.reduce]
        if self.policy.params == self.policy.compute:
            master_copy = 0
        else:
            master_copy = p
        if self.policy.params == self.policy.reduce:
            finished_grad = 0
        else:
            finished_grad = p
        adam_states = 2 * p
        if self.zero == 0:
            return c + r + finished_grad + master_copy + adam_states
        if self.zero == 1:
            sharded = finished_grad + master_copy + adam_states
            return c + r + sharded / self.degree
        if self.zero == 2:
            sharded = p + master_copy + adam_states
            return c + sharded / self.degree
        return (p + p + adam_states) / self.degree

    def shared_bytes(self) -> int:
        """Beside the states, on the CPU: the segment through which the group of all ranks exchanges. It is counted on
        every rank, and exists once a host.
        """
        return segment_bytes(self.degree)


@dataclass(frozen=True)
class Measured:
    """Bytes that one rank holds between steps, measured.

    Attributes:
        num_params: parameters of the whole model on this rank.
        tensors: bytes of the storages of live tensors, less the segment of `Setting.shared_bytes`.
        resident: growth of the process's resident set.
    """

    num_params: int
    tensors: int
    resident: int

    @property
    def bytes_per_param(self) -> float:
        return self.tensors / self.num_params


def make_plan(mesh: str, fields: Mapping[str, Any], *, seq_len: int, **plan_fields: Any) -> Plan:
    """A plan of a LLaMA with the config `fields`."""
    config = FAMILIES["llama3"].Config(**fields)
    return Plan(
        mesh=Mesh.parse(mesh),
        family="llama3",
        architecture=canonical_json(config.model_dump()),
        stages=make_stages(config.block_specs(seq_len), 1),
        seq_len=seq_len,
        **plan_fields,
    )


def zero_tokens(seq_len: int) -> Batch:
    """One sequence of token 0."""
    tokens = torch.zeros(1, seq_len, dtype=torch.int64)
    return token_batch(tokens, tokens)


def live_bytes() -> int:
    """Bytes of the storages of all tensors of this process; shared storages count once."""
    gc.collect()
    storage_bytes: dict[int, int] = {}
    for tensor in gc.get_objects():
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            storage_bytes[storage._cdata] = storage.nbytes()
    return sum(storage_bytes.values())


def resident_bytes() -> int:
    """Resident set of this process."""
    return psutil.Process().memory_info().rss


def settled(read: Callable[[], int]) -> int:
    """Minimum of several readings over a short time, which excludes memory that is about to be freed.

    The backend's threads keep the tensors of a finished call for a moment, and messages of a faster rank may be in flight.
    """
    readings = []
    for _ in range(SETTLE_READINGS):
        readings.append(read())
        time.sleep(SETTLE_S / SETTLE_READINGS)
    return min(readings)


@dataclass(frozen=True)
class MeasureStates:
    """Main function of a rank: memory between steps for a setting. A picklable value, as processes need."""

    setting: Setting
    fields: tuple[tuple[str, Any], ...]

    def __call__(self, comm: Comm) -> Measured:
        plan = self._plan(comm.mesh)
        tensors_before = live_bytes()
        resident_before = resident_bytes()
        step = self._build_step(plan, comm)
        batch = zero_tokens(STATE_SEQ_LEN)
        for _ in range(2):
            step([batch], lr=1e-3)
        num_params = sum(shard.box.size for shard in step.model.shards.values())
        batch_bytes = (
            batch.inputs.untyped_storage().nbytes() + batch.positions.untyped_storage().nbytes()
        )
        tensors = settled(live_bytes) - tensors_before - batch_bytes
        resident = resident_bytes() - resident_before
        return Measured(num_params, tensors - self.setting.shared_bytes(), resident)

    def _plan(self, mesh: Mesh) -> Plan:
        policy = self.setting.policy
        return make_plan(
            mesh.text,
            dict(self.fields),
            seq_len=STATE_SEQ_LEN,
            zero=self.setting.zero,
            bucket_bytes=2**40,
            params=policy.params,
            compute=policy.compute,
            reduce=policy.reduce,
        )

    def _build_step(self, plan: Plan, comm: Comm) -> TrainStep:
        family = FAMILIES["llama3"]
        config = family.Config(**dict(self.fields))
        model = build_model(family, config, plan, comm, seed=1)
        decayed = matrices(model.params)

        def adamw(tensors: Mapping[str, Tensor]) -> Any:
            return make_optimizer(tensors, OptimConfig(), decay_names=decayed)

        return TrainStep(model, make_optimizer=adamw, clip=1.0)


def measure_states(setting: Setting, fields: Mapping[str, Any]) -> Measured:
    """The rank with the most tensor bytes of a run in processes."""
    rank_main = MeasureStates(setting, tuple(fields.items()))
    mesh = f"dp{setting.degree}"
    ranks = run_ranks(mesh, rank_main, transport="processes")
    most = max(measured.tensors for measured in ranks)
    (first, *_) = [measured for measured in ranks if measured.tensors == most]
    return first


@dataclass(frozen=True)
class MeasureLayer:
    """Main function of a rank: bytes that one layer saves for backward, without parameters, input and output."""

    recompute: Recompute
    fields: tuple[tuple[str, Any], ...]
    seq_len: int

    def __call__(self, comm: Comm) -> int:
        family = FAMILIES["llama3"]
        fields = dict(self.fields)
        config = family.Config(**fields)
        plan = make_plan(comm.mesh.text, fields, seq_len=self.seq_len, recompute=self.recompute)
        model = build_model(family, config, plan, comm, seed=1)
        layer = model.blocks["layer0"]
        batch = zero_tokens(self.seq_len).columns(index=comm.index("cp"), degree=comm.degree("cp"))
        x = torch.randn(*batch.inputs.shape, config.dim).requires_grad_()
        ropes = [module for module in layer.modules() if isinstance(module, Rope)]
        angles = [angle for rope in ropes for angle in rope(batch.positions)]  # of all layers
        with Live() as live:
            y = layer(x, batch)
        excluded = (x, y, batch.positions, *angles, *layer.parameters())
        saved = settled(lambda: live.num_bytes(but=excluded))
        y.sum().backward()  # completes the messages of ring attention on every rank
        return saved


def predicted_layer_bytes(recompute: Recompute, fields: Mapping[str, Any], tokens: int) -> int:
    """Predicted activation bytes in float32, without the angles that all layers share; measured by
    tests/gloo/test_memory.py.
    """
    dim = fields["dim"]
    heads = fields["heads"]
    kv_heads = fields["kv_heads"]
    ffn = fields["ffn"]
    head_size = dim // heads
    qkv = (heads + 2 * kv_heads) * head_size
    attention_out = heads * head_size
    statistics = heads
    selective = dim + qkv + attention_out + 2 * ffn + statistics
    norm_statistics = 2
    none = selective + 4 * dim + 2 * ffn + norm_statistics
    features = {"none": none, "selective": selective, "full": 0}
    return ITEM_BYTES["float32"] * tokens * features[recompute]


def print_state_table(dim: int) -> None:
    fields = {"layers": 6, "dim": dim, "heads": 8, "kv_heads": 8, "ffn": 3 * dim, "vocab": 256}
    print(
        "| types | zero | ranks | theory, bytes a parameter | measured | difference | tensors, MB | resident, MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, policy in POLICIES.items():
        for zero in ZERO_STAGES:
            for degree in (2, 4):
                setting = Setting(zero, policy, degree)
                measured = measure_states(setting, fields)
                print_state_row(name, setting, measured)


def print_state_row(policy_name: str, setting: Setting, measured: Measured) -> None:
    predicted = setting.predicted_bytes()
    difference = measured.bytes_per_param / predicted - 1
    cells = [
        policy_name,
        str(setting.zero),
        f"dp{setting.degree}",
        f"{predicted:.2f}",
        f"{measured.bytes_per_param:.2f}",
        f"{100 * difference:+.2f}%",
        f"{measured.tensors / 1e6:.1f}",
        f"{measured.resident / 1e6:.1f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def print_layer_table() -> None:
    print("\n| recompute | ranks | formula, KB a layer | measured |\n|---|---|---|---|")
    for recompute in RECOMPUTE_MODES:
        fields = tuple(LAYER.items())
        measure = MeasureLayer(recompute, fields, LAYER_SEQ_LEN)
        for degree in CP_DEGREES:
            mesh = f"cp{degree}" if degree > 1 else ""
            measured = max(run_ranks(mesh, measure))
            predicted = predicted_layer_bytes(recompute, LAYER, LAYER_SEQ_LEN // degree)
            print(
                f"| {recompute} | {mesh or 'one'} | {predicted / 1e3:.1f} | {measured / 1e3:.1f} |"
            )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dim", type=int, default=256, help="width of the model whose states are measured"
    )
    args = parser.parse_args()
    print_state_table(args.dim)
    print_layer_table()


if __name__ == "__main__":
    main()
