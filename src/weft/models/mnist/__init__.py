"""Classifiers of grey images: config.py, model.py."""
