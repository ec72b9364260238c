"""Owns the commands that have a file of their own: keys, checks, then the work, which imports torch late."""
