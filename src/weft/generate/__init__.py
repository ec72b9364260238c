"""Owns generation: text that a model writes after a prompt, on any mesh, with what attention has seen kept."""
