"""Pipeline parallelism: the player of a schedule's row, split backward, a module wrapper."""
