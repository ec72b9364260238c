"""GPT-2: config.py, model.py, hf.py."""
