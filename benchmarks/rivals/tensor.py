"""Tensor parallelism compared with DTensor's: vocabulary, heads and features over two ranks, with and without SP."""

from __future__ import annotations

import torch
from benchmarks.rivals.training import CLIP, PlainModel, Step, Training, torch_adamw
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
REPLICATED = Replicate()
COLUMN_PARALLEL = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")
ROW_PARALLEL = ("attn.o", "mlp.down")


def tensor_parallel(training: Training) -> dict[str, Step]:
    """Activations outside of attention and MLP are replicated."""
    return {
        "DTensor Colwise/RowwiseParallel": _dtensor_step(training, outside=REPLICATED),
        "tp2, trainer": training.weft_step(micro_size=training.size.sequences),
    }


def sequence_parallel(training: Training) -> dict[str, Step]:
    """Activations outside of attention and MLP are sharded along the sequence."""
    return {
        "DTensor with SequenceParallel": _dtensor_step(training, outside=Shard(1)),
        "tp2 sequence, trainer": training.weft_step(
            micro_size=training.size.sequences, sequence_parallel=True
        ),
    }


COMPARISONS = {"tp": tensor_parallel, "tp + sp": sequence_parallel}


def _dtensor_step(training: Training, *, outside: Replicate | Shard) -> Step:
    net = PlainModel(training.plain_blocks())
    mesh = init_device_mesh("cpu", (training.comm.mesh.size,))
    parallelize_module(net.blocks, mesh, _parallel_styles(net.blocks, outside))
    sharded = [param for param in net.parameters() if isinstance(param, DTensor)]
    replicated = [param for param in net.parameters() if not isinstance(param, DTensor)]
    groups = [group for group in (sharded, replicated) if group]
    optimizer = torch_adamw(*groups)
    batch = training.batch

    def step() -> float:
        optimizer.zero_grad()
        with loss_parallel():
            loss = net(batch)
            loss.backward()
        _clip(sharded, replicated)
        optimizer.step()
        if isinstance(loss, DTensor):
            whole_loss = loss.full_tensor()
        else:
            whole_loss = loss
        return whole_loss.item()

    return step


def _parallel_styles(blocks: nn.ModuleDict, outside: Replicate | Shard) -> dict[str, ParallelStyle]:
    """The plan of torch's tutorial and of torchtitan."""
    styles: dict[str, ParallelStyle] = {}
    styles["embed.tok"] = RowwiseParallel(input_layouts=REPLICATED, output_layouts=outside)
    styles["head.proj"] = ColwiseParallel(
        input_layouts=outside,
        output_layouts=Shard(-1),
        use_local_output=False,
    )
    layers = [name for name in blocks if name.startswith("layer")]
    for layer in layers:
        for path in COLUMN_PARALLEL:
            styles[f"{layer}.{path}"] = ColwiseParallel()
        for path in ROW_PARALLEL:
            styles[f"{layer}.{path}"] = RowwiseParallel(output_layouts=outside)
    if outside is not REPLICATED:
        _add_sequence_parallel_styles(styles, blocks, layers, outside)
    return styles


def _add_sequence_parallel_styles(
    styles: dict[str, ParallelStyle],
    blocks: nn.ModuleDict,
    layers: list[str],
    outside: Shard,
) -> None:
    """Gather the sequence before attention and MLP; norms work on shards of it."""
    for layer in layers:
        styles[f"{layer}.attn"] = PrepareModuleInput(
            input_layouts=(outside, None),
            desired_input_layouts=(REPLICATED, None),
        )
        styles[f"{layer}.mlp"] = PrepareModuleInput(
            input_layouts=outside,
            desired_input_layouts=REPLICATED,
        )
    for path, module in blocks.named_modules():
        if isinstance(module, nn.RMSNorm):
            styles[path] = SequenceParallel()


def _clip(sharded: list[DTensor], replicated: list[Tensor]) -> None:
    """clip_grad_norm_ rejects a mix of plain tensors and DTensors: without sequence parallelism the norms are plain."""
    if not replicated:
        nn.utils.clip_grad_norm_(sharded, CLIP)
        return
    sharded_grads = [param.grad for param in sharded]
    replicated_grads = [param.grad for param in replicated]
    # full_tensor: a gradient's placement may differ from its parameter's
    sharded_square = nn.utils.get_total_norm(sharded_grads).full_tensor().square()
    replicated_square = torch.stack(torch._foreach_norm(replicated_grads)).square().sum()
    norm = (sharded_square + replicated_square).sqrt()
    scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    local_grads = [gradient.to_local() for gradient in sharded_grads]
    torch._foreach_mul_([*local_grads, *replicated_grads], scale)
