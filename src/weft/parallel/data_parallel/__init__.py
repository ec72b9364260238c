"""Data parallelism for plain modules: DistributedDataParallel over ranks, DataParallel over the devices of one process."""
