"""Hugging Face folders: weight mapping, import, export, adapters."""
