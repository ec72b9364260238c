"""Mistral: config.py, model.py, hf.py."""
