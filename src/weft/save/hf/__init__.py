"""Owns the tensors of Hugging Face folders: one table per family, a reader that is a `Source`, a writer that streams."""
