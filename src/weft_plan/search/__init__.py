"""Search of the best layout of a run: candidates, costs from measured blocks, bounds, and the report."""
