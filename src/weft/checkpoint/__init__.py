"""Checkpoints: file format, writing, reading, restoring and resuming, independent of the layout that wrote them."""
