"""Text generation from trained models on any mesh, with cached keys and values."""
