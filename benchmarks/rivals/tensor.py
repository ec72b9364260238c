"""Tensor parallelism against DTensor's: vocabulary, heads and features over two ranks, with and without sequence parallelism."""

from __future__ import annotations

import torch
from benchmarks.rivals.course import CLIP, Chain, Course, Step, torch_adamw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

MESH = "tp2"
WHOLE = Replicate()
COLUMNS, ROWS = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"), ("attn.o", "mlp.down")


def plain(course: Course) -> dict[str, Step]:
    """Every rank has all tokens outside of attention and MLP."""
    return {
        "DTensor Colwise/RowwiseParallel": _torchs(course, outside=WHOLE),
        "tp2, trainer": course.weft_step(micro=course.size.sequences),
    }


def sequence(course: Course) -> dict[str, Step]:
    """Outside of attention and MLP every rank has its part of the sequence."""
    return {
        "DTensor with SequenceParallel": _torchs(course, outside=Shard(1)),
        "tp2 sequence, trainer": course.weft_step(micro=course.size.sequences, sequence_parallel=True),
    }


LINES = {"tp": plain, "tp + sp": sequence}


def _torchs(course: Course, *, outside: Replicate | Shard) -> Step:
    net = Chain(course.plain_blocks())
    mesh = init_device_mesh("cpu", (course.comm.mesh.size,))
    parallelize_module(net.blocks, mesh, _styles(net.blocks, outside))
    sharded = [param for param in net.parameters() if isinstance(param, DTensor)]
    whole = [param for param in net.parameters() if not isinstance(param, DTensor)]
    optimizer, batch = torch_adamw(*(group for group in (sharded, whole) if group)), course.batch

    def step() -> float:
        optimizer.zero_grad()
        with loss_parallel():
            loss = net(batch)
            loss.backward()
        _clip(sharded, whole)
        optimizer.step()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    return step


def _styles(blocks: nn.ModuleDict, outside: Replicate | Shard) -> dict[str, ParallelStyle]:
    """As torch's own tutorial and torchtitan lay them out."""
    styles: dict[str, ParallelStyle] = {
        "embed.tok": RowwiseParallel(input_layouts=WHOLE, output_layouts=outside),
        "head.proj": ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in (name for name in blocks if name.startswith("layer")):
        styles |= {f"{name}.{path}": ColwiseParallel() for path in COLUMNS}
        styles |= {f"{name}.{path}": RowwiseParallel(output_layouts=outside) for path in ROWS}
        if outside is not WHOLE:
            styles[f"{name}.attn"] = PrepareModuleInput(
                input_layouts=(outside, None), desired_input_layouts=(WHOLE, None)
            )
            styles[f"{name}.mlp"] = PrepareModuleInput(input_layouts=outside, desired_input_layouts=WHOLE)
    if outside is not WHOLE:
        norms = [path for path, module in blocks.named_modules() if isinstance(module, nn.RMSNorm)]
        styles |= {path: SequenceParallel() for path in norms}
    return styles


def _clip(sharded: list[DTensor], whole: list[Tensor]) -> None:
    """clip_grad_norm_ refuses plain tensors beside DTensors: without sequence parallelism the norms are plain."""
    if not whole:
        nn.utils.clip_grad_norm_(sharded, CLIP)
        return
    gradients, same = [param.grad for param in sharded], [param.grad for param in whole]
    squares = nn.utils.get_total_norm(gradients).full_tensor().square()  # their placements need not be the parameters'
    norm = (squares + torch.stack(torch._foreach_norm(same)).square().sum()).sqrt()
    own = [gradient.to_local() for gradient in gradients]
    torch._foreach_mul_([*own, *same], (CLIP / (norm + 1e-6)).clamp(max=1.0))
