"""weft_selftest: tests of weft's own claims: planted faults that proofs must report, healthy runs, injected failures.

It stands on `weft`, which finds its commands (`weft chaos`, `weft prove --mutants`, `--sweep`) by
entry points and never imports it.
"""
