"""Hugging Face folders: import, export, LoRA adapters in PEFT's layout, comparison of logits with transformers."""
