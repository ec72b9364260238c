"""Qwen3: config.py, model.py, hf.py."""
