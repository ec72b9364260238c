"""Qwen2: config.py, model.py, hf.py."""
