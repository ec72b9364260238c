"""Owns state on disk: layout-free checkpoints, and files of other programs. Knows boxes, nothing of how a rank computes."""
