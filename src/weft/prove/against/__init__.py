"""`weft prove --against transformers`: the layout compared with a training loop over transformers' own model classes."""
