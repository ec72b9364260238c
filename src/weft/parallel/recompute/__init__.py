"""Activation recomputation: full and selective."""
