"""Classifiers of grey images: config.py (no torch) and model.py."""
