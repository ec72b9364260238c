"""Whether the GPUs of a run compute its linears in 8-bit floats: device, number type, and sizes on a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.config.fp8 import fp8_linears, fp8_shapes
from weft.config.hardware import hardware_of_cuda
from weft.config.run import Run, plan_of
from weft.core.model_config import logical_axes
from weft.core.shard import sharded_over
from weft.errors import Fault
from weft.models import FAMILIES
from weft.start.environment import has_gpus

UNIT = 16
"""Features on a rank are multiples of this, as the kernels of GPUs take them."""


def fp8_gpu_faults(run: Run) -> Iterator[Fault]:
    """Why the GPUs that the run computes on have no products in fp8 for it; the CPU computes them in
    wider types.
    """
    if run.precision.linears != "fp8" or not has_gpus(run.device):
        return
    from weft.run.devices import gpu_names  # late: it imports torch

    yield from faults_on_gpus(run, gpu_names())


def faults_on_gpus(run: Run, names: Sequence[str]) -> Iterator[Fault]:
    """The same for GPUs of these names."""
    key, off = "precision.linears", "--precision.linears default"
    for name in names:
        known = hardware_of_cuda(name)
        if known is not None and known.fp8_tflops is None:
            need = "a GPU of compute capability 8.9 or more"
            fix = f"{off}; --device cpu computes the same in float32"
            yield Fault(key, "this GPU has no products in fp8", got=name, need=need, fix=fix)
    if run.precision.compute != "bfloat16":
        what = "is not the type of the operands that GPUs round to fp8"
        fix = "--precision.compute bfloat16"
        got = run.precision.compute
        yield Fault("precision.compute", what, got=got, need="bfloat16", fix=fix)
    shapes, experts = fp8_shapes(run.model), run.model.expert_linears()
    axes = FAMILIES[run.model.name].axes(run.model)
    plan = plan_of(run)
    for name in fp8_linears(run.precision, run.model):
        if name in experts:
            _, *logical = logical_axes(name, axes)
        else:
            logical = [*logical_axes(f"{name}.weight", axes)]
        sizes = []
        for axis, size in zip(logical, shapes[name], strict=True):
            sharded = sharded_over(axis, plan.sharding_rule)
            sizes.append(size // plan.mesh.degree(sharded) if sharded else size)
        if any(size % UNIT for size in sizes):
            out_features, in_features = sizes
            yield Fault(
                key,
                f"{name} has sizes that products in fp8 do not take",
                got=f"{in_features} features in, {out_features} out on a rank",
                need=f"multiples of {UNIT}",
                fix=f"add {name.partition('.')[2]} to --precision.fp8_exclude",
            )
            return
