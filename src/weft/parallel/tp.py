"""Tensor parallelism: the mesh axis and its record. Imports no torch."""

AXIS = "tp"
