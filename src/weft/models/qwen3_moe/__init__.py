"""Qwen3 with mixtures of experts: config.py (no torch) and model.py."""
