"""Commands that test weft itself: `weft chaos`, `weft prove --mutants` and `weft prove --sweep`."""
