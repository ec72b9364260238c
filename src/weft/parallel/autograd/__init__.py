"""Autograd extensions shared by dimensions: the split backward, and nested outputs of modules as flat tensors."""
