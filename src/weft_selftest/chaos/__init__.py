"""Injected failures: plans of faults, their injection into ranks, trials and the report of `weft chaos`."""
