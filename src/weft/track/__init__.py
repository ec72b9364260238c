"""Trackers: the numbers and texts of a run, passed to TensorBoard, W&B, MLflow, trackio, CSV, Prometheus. No torch."""
