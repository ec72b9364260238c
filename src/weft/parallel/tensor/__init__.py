"""Tensor parallelism: column- and row-parallel linears, parallel vocabulary, regions."""
