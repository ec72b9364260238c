"""weft against torch's own, line by line, in the same processes: `python -m benchmarks.rivals --help`."""
