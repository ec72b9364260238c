"""DeepSeek-V2 and V3: config.py (no torch) and model.py."""
