"""Expert parallelism: token dispatch by all-to-all."""
