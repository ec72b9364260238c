"""Starting ranks: local processes and threads, torchrun, Slurm; devices, signals, failures."""
