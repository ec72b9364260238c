"""Data types and functions that need no torch: mesh, axes, shards, attention masks."""
