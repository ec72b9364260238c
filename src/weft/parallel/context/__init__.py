"""Context parallelism: attention over sequences that are sharded among ranks."""
