"""Gemma 3: config.py, model.py, hf.py."""
