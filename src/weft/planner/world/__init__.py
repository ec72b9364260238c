"""Check of all ranks together before a run: equal calls in every group, and no cycle of ranks that wait."""
