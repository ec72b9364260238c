"""Layers and parts that model families share: attention, MLPs, experts, rotary embeddings, batches, initialisation."""
