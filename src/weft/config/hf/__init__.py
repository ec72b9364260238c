"""Hugging Face config.json read as, and written from, weft's model fields. No torch."""
