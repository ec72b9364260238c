"""One rank's training step measured on the meta device: memory, operations and traffic, from the real code."""
