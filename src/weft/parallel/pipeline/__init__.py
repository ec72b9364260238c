"""Pipeline parallelism: the player of a schedule's row, the split backward, `PipelineParallel`."""
