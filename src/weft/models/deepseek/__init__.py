"""DeepSeek-V2 and V3: config.py, model.py, hf.py."""
