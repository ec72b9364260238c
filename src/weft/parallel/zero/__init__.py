"""ZeRO 1-3: sharded parameter groups, unshard hooks, FullyShardedDataParallel, ShardedOptimizer."""
