"""Comparisons of weft with torch's own implementation of each parallelism: `python -m benchmarks.rivals --help`."""
