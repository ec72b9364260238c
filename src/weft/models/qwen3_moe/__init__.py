"""Qwen3 with mixtures of experts: config.py, model.py, hf.py."""
