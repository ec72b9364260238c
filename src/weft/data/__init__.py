"""Training data: files, tokenizers, packing, mixtures, and the order of samples. No torch, no ranks."""
