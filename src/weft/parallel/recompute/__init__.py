"""Activation recomputation: full (a whole block) and selective (cheap results)."""
