"""From a plain model to this rank's shard of it, and its gradients."""
