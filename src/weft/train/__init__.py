"""Training: the step, the loop, optimizers, data loading, evaluation and the event log."""
