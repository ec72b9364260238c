"""LLaMA 3: config.py (no torch) and model.py."""
