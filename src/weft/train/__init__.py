"""Training: the step, the loop, optimizers, data feeding, evaluation, events."""
