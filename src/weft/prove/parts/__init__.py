"""Proofs of single parts of a run: resumes and restarts, generation with caches, export and import."""
