"""What is measured of a run on the meta device: its training step, under the plan of a layout.

The one module of the planner that reads a whole run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.comm.transport import SharedResults
from weft.config.lora import adapter_flops
from weft.config.run import Run, hardware_of, plan_of
from weft.config.schema import MAX_COUNT
from weft.core.attention_choice import FLASH_CAPABILITY, AttentionDevice
from weft.core.expert_choice import GROUPED_CAPABILITIES, ExpertDevice
from weft.core.model_config import ModelConfig
from weft.data.record_sources import packs_documents
from weft.layout.plan import Plan
from weft.layout.recomputation import read_policy
from weft.layout.utilization import AdapterFlops
from weft.models import Family
from weft.models.common.attention_kernels import varlen_with_windows
from weft.models.common.lazy_blocks import LazyBlocks
from weft.models.common.score_losses import REWARD
from weft.planner.measure.equal_blocks import equal_blocks
from weft.train.build import StepConfig
from weft.train.build_training import DPO, step_config
from weft.train.init_from import lazy_blocks


@dataclass(frozen=True)
class BatchFields:
    """Which fields the batches of a run have besides tokens, targets and positions.

    Attributes:
        documents: the document of each token: attention then has a mask.
        pairs: marks of preference pairs.
        references: reference log-probabilities of their targets.
    """

    documents: bool = False
    pairs: bool = False
    references: bool = False

    @staticmethod
    def of(run: Run) -> BatchFields:
        """The fields of the batches that a run trains on."""
        has_pairs = run.loss in (DPO, REWARD)
        is_text = run.model.kind == "tokens"
        has_documents = has_pairs or (is_text and packs_documents(run.data))
        has_references = run.loss == DPO and run.dpo.has_reference
        return BatchFields(has_documents, has_pairs, has_references)


@dataclass(frozen=True)
class MeasuredRun:
    """The training step of a run, and its plan.

    Attributes:
        config: of the step; no outer step follows it.
        run: whose step and plan they are.
        fields: of its batches.
        shared_results: of the ranks that are played under this plan.
    """

    config: StepConfig
    plan: Plan
    run: Run
    fields: BatchFields = BatchFields()
    shared_results: SharedResults = field(default_factory=SharedResults, compare=False, repr=False)

    @staticmethod
    def of(run: Run) -> MeasuredRun:
        """What is measured of a run under its own plan."""
        config = step_config(run)
        outer = replace(config.outer, every=MAX_COUNT)
        config = replace(config, outer=outer)
        return MeasuredRun(config, _measured_plan(run), run, BatchFields.of(run))

    def with_layout(self, values: Mapping[str, Any]) -> MeasuredRun:
        """The same step under the plan of other values of layout and batch: `{"mesh": "dp2"}`."""
        changed = self.run.with_values(values)
        return replace(
            self, plan=_measured_plan(changed), run=changed, shared_results=SharedResults()
        )

    def with_model(self, model: ModelConfig) -> MeasuredRun:
        """The run with another model."""
        return MeasuredRun.of(self.run.with_values({"model": model}))

    def with_plan(self, plan: Plan) -> MeasuredRun:
        """The same step under another plan; of one whose stages lack blocks the others are measured."""
        return replace(self, plan=plan, shared_results=SharedResults())

    @property
    def global_size(self) -> int:
        """Sequences of a step, as configured: a plan has those that its micro-batches fill."""
        return self.run.batch.global_size

    @property
    def adapted(self) -> AdapterFlops:
        """Products with frozen weights and with adapters."""
        return adapter_flops(self.run.lora, self.run.model, self.plan.seq_len)

    @property
    def family(self) -> Family:
        """The family of the model, with adapters and loss."""
        return self.config.family

    @property
    def attention_device(self) -> AttentionDevice | None:
        """The kind of device that attention is measured for; None: a CPU."""
        if not self.is_for_gpu:
            return None
        has_varlen = varlen_with_windows() is not None
        return AttentionDevice("cuda", FLASH_CAPABILITY, has_varlen=has_varlen)

    @property
    def expert_device(self) -> ExpertDevice:
        """The kind of device that products of experts are measured for."""
        if self.is_for_gpu:
            return ExpertDevice("cuda", (GROUPED_CAPABILITIES[0], 0))
        return ExpertDevice("cpu")

    @property
    def is_for_gpu(self) -> bool:
        """Whether the device of `hardware`, or else of `device`, is a GPU."""
        return _is_for_gpu(self.run)

    def block_kinds(self) -> Mapping[str, str]:
        """Name of a block -> name of the first block that equals it and recomputes the same; blocks
        with tied parameters equal none.
        """
        model = self.config.model
        blocks = lazy_blocks(self.family, model)
        tied: set[str] = set()
        for alias, owner in self.family.ties(model).items():
            for name in (alias, owner):
                block, _, _ = name.partition(".")
                tied.add(block)
        if isinstance(blocks, LazyBlocks):
            repeats = blocks.repeats(distinct=tied)
        else:
            repeats = equal_blocks(blocks, distinct=tied)
        modes = self.plan.recompute_of
        firsts: dict[tuple[str, str], str] = {}
        kinds = {}
        for name in blocks:
            form = repeats.get(name, name), modes.get(name, "none")
            kinds[name] = firsts.setdefault(form, name)
        return kinds


def _is_for_gpu(run: Run) -> bool:
    """Whether a run is measured for a GPU: by the device of `hardware`, or else by `device`."""
    hardware = hardware_of(run)
    return (run.device if hardware is None else hardware.device) == "cuda"


def _measured_plan(run: Run) -> Plan:
    """The plan of a run. On CPUs what is offloaded stays where it is, and `compile = "auto"` is off."""
    plan = plan_of(run)
    if _is_for_gpu(run):
        return plan
    kept = plan.recompute.replace("offload", "none")
    compiles = plan.compile if plan.compiles_blocks("cpu") else "off"
    return plan.model_copy(update={"recompute": read_policy(kept).text, "compile": compiles})
