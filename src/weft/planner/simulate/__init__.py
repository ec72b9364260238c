"""From measured work to seconds: speeds of a device, regions and schedules replayed, jitter, failures, sites."""
