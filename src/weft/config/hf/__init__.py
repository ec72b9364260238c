"""config.json of Hugging Face folders, both ways, and the list of their tensors. No torch."""
