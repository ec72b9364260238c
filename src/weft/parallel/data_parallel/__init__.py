"""Data parallelism: gradient buckets, DistributedDataParallel, DataParallel."""
