"""The keys of a run that make its layout, and the sizes that they must agree with. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.config.run import Run
from weft.config.schema import BatchConfig, ModelSection, ParallelConfig, PipelineConfig
from weft.core.mesh import Mesh


@dataclass(frozen=True)
class LayoutKeys:
    """What a layout is made of, and checked against.

    Attributes:
        seq_len: tokens of a sequence.
    """

    mesh: Mesh
    batch: BatchConfig
    parallel: ParallelConfig
    pipeline: PipelineConfig
    model: ModelSection
    seq_len: int

    @staticmethod
    def of(run: Run) -> LayoutKeys:
        """Those of a run."""
        return LayoutKeys(
            mesh=run.device_mesh,
            batch=run.batch,
            parallel=run.parallel,
            pipeline=run.pipeline,
            model=run.model,
            seq_len=run.data.seq_len,
        )

    def with_batch(self, global_size: int) -> LayoutKeys:
        """The same with another number of sequences a step."""
        batch = self.batch.model_copy(update={"global_size": global_size})
        return replace(self, batch=batch)
