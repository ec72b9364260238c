"""Data parallelism compared with accelerate around transformers' own LLaMA, as its users train: two ranks over gloo."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.rivals.training import CLIP, Step, Training, torch_adamw

from tests.hf.folders import write
from tests.memory_source import Memory
from weft.models.common.init import named_parameters

MESH = "dp2"


def accelerated(training: Training) -> dict[str, Step]:
    """A step of a script: `accelerator.prepare`, backward, clipping, `optimizer.step`."""
    micro_size = training.size.sequences // training.comm.mesh.size
    return {
        "accelerate, LlamaForCausalLM": _accelerate_step(training),
        "trainer": training.weft_step(micro_size=micro_size),
    }


COMPARISONS = {"accelerate": accelerated}


def _accelerate_step(training: Training) -> Step:
    from accelerate import Accelerator

    rank, size = str(training.comm.rank), str(training.comm.mesh.size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == training.comm.mesh.size
    model = _hf_model(training)
    net, optimizer = accelerator.prepare(model, torch_adamw(model.parameters()))
    rows = training.local_rows
    inputs, targets = rows.inputs.contiguous(), rows.targets.contiguous()

    def step() -> float:
        optimizer.zero_grad()
        loss = net(input_ids=inputs, labels=targets, shift_labels=targets).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / accelerator.num_processes

    return step


def _hf_model(training: Training) -> Any:
    """transformers' LLaMA with the initial values of both sides."""
    from transformers import LlamaForCausalLM

    params = named_parameters(training.plain_blocks())
    values = Memory({name: param.detach() for name, param in params.items()})
    with tempfile.TemporaryDirectory() as folder:
        written = write(Path(folder) / "llama", training.size.config, values)
        model = LlamaForCausalLM.from_pretrained(written, dtype=torch.float32)
    return model.train()
