"""Predictions for a run before it starts: memory, floating-point operations and traffic of every rank, from the real code."""
