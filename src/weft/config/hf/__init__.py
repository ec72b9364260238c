"""Hugging Face config.json, both ways, and the list of tensors of a folder. No torch."""
