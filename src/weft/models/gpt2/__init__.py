"""GPT-2: config.py (no torch) and model.py."""
