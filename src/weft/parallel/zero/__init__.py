"""Gradient reduction and ZeRO 1-3: parameter groups, reducer, unshard hooks, FullyShardedDataParallel, ShardedOptimizer."""
