"""Checks of weft on one GPU: environment, layouts against one rank, NCCL, determinism, checkpoints, speed."""
