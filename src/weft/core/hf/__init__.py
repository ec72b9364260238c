"""Owns what a Hugging Face folder says of its model: config.json to a family and its fields and back. Pure: no torch."""
