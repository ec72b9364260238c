"""Owns what a run reads: files of any kind, tokenizers, packing, mixtures, the order of samples. No torch, no ranks."""
