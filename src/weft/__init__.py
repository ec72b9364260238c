"""weft: train one model on many devices, and prove that it is the model one device would have trained.

The names below are the public ones. They are loaded on first use, so that `import weft` (and every
command that only has to reject its input) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.checkpoint.scripts import load, save
    from weft.comm.comm import Comm
    from weft.comm.transport import Work
    from weft.core.attention_mask import AttentionMask
    from weft.core.input_spec import InputSpec
    from weft.core.mesh import Mesh
    from weft.core.shard import Stacked
    from weft.errors import WeftError
    from weft.layout.plan import Plan
    from weft.models.common.attention import Attend
    from weft.models.common.batch import Batch, Extra
    from weft.models.common.buffer_updates import update_buffers
    from weft.models.common.dropout import DropPath, drop_path
    from weft.models.common.layers import Loss, RegionInput, RegionOutput
    from weft.models.user_model import Model
    from weft.parallel.autograd.clipping import clip_grad_norm_
    from weft.parallel.context.ring import ring_attention
    from weft.parallel.data_parallel.ddp import DistributedDataParallel
    from weft.parallel.data_parallel.replicas import DataParallel
    from weft.parallel.data_parallel.sync_batch_norm import SyncBatchNorm
    from weft.parallel.pipeline.module import PipelineParallel
    from weft.parallel.scripts.parallelize import parallelize
    from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
    from weft.parallel.tensor.sequence import SequenceParallel
    from weft.parallel.tensor.vocab import VocabParallelEmbedding
    from weft.parallel.zero.fsdp import FullyShardedDataParallel
    from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
    from weft.prove.report import ProofReport
    from weft.pytest_plugin import layouts
    from weft.python_api import Result, Step, prove, steps, train
    from weft.run.init import init
    from weft.train.optimizers.contract import Optimizer

__version__ = "0.1.0"

_HOMES = {
    "Attend": "weft.models.common.attention",
    "AttentionMask": "weft.core.attention_mask",
    "Batch": "weft.models.common.batch",
    "ColumnParallelLinear": "weft.parallel.tensor.linear",
    "Comm": "weft.comm.comm",
    "DataParallel": "weft.parallel.data_parallel.replicas",
    "DistributedDataParallel": "weft.parallel.data_parallel.ddp",
    "DropPath": "weft.models.common.dropout",
    "Extra": "weft.models.common.batch",
    "FullyShardedDataParallel": "weft.parallel.zero.fsdp",
    "InputSpec": "weft.core.input_spec",
    "Loss": "weft.models.common.layers",
    "Mesh": "weft.core.mesh",
    "Model": "weft.models.user_model",
    "Optimizer": "weft.train.optimizers.contract",
    "PipelineParallel": "weft.parallel.pipeline.module",
    "Plan": "weft.layout.plan",
    "ProofReport": "weft.prove.report",
    "RegionInput": "weft.models.common.layers",
    "RegionOutput": "weft.models.common.layers",
    "Result": "weft.python_api",
    "RowParallelLinear": "weft.parallel.tensor.linear",
    "SequenceParallel": "weft.parallel.tensor.sequence",
    "ShardedOptimizer": "weft.parallel.zero.sharded_optimizer",
    "Stacked": "weft.core.shard",
    "Step": "weft.python_api",
    "SyncBatchNorm": "weft.parallel.data_parallel.sync_batch_norm",
    "VocabParallelEmbedding": "weft.parallel.tensor.vocab",
    "WeftError": "weft.errors",
    "Work": "weft.comm.transport",
    "clip_grad_norm_": "weft.parallel.autograd.clipping",
    "drop_path": "weft.models.common.dropout",
    "init": "weft.run.init",
    "layouts": "weft.pytest_plugin",
    "load": "weft.checkpoint.scripts",
    "parallelize": "weft.parallel.scripts.parallelize",
    "ring_attention": "weft.parallel.context.ring",
    "save": "weft.checkpoint.scripts",
    "steps": "weft.python_api",
    "update_buffers": "weft.models.common.buffer_updates",
}

__all__ = [
    "Attend",
    "AttentionMask",
    "Batch",
    "ColumnParallelLinear",
    "Comm",
    "DataParallel",
    "DistributedDataParallel",
    "DropPath",
    "Extra",
    "FullyShardedDataParallel",
    "InputSpec",
    "Loss",
    "Mesh",
    "Model",
    "Optimizer",
    "PipelineParallel",
    "Plan",
    "ProofReport",
    "RegionInput",
    "RegionOutput",
    "Result",
    "RowParallelLinear",
    "SequenceParallel",
    "ShardedOptimizer",
    "Stacked",
    "Step",
    "SyncBatchNorm",
    "VocabParallelEmbedding",
    "WeftError",
    "Work",
    "clip_grad_norm_",
    "drop_path",
    "init",
    "layouts",
    "load",
    "parallelize",
    "prove",
    "ring_attention",
    "save",
    "steps",
    "train",
    "update_buffers",
]


def __getattr__(name: str) -> object:
    if name in ("prove", "train"):
        return import_module(f"weft.{name}")  # a package that is a function, too
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
