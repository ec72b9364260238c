"""Job files for cluster engines: Slurm, Ray, Kubeflow Trainer and SkyPilot. No torch."""
