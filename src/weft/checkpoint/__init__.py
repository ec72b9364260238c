"""Checkpoint format: write, read, verify; independent of the layout that wrote it."""
