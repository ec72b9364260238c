"""Commands, one file each: options, checks, then the work, which imports torch late."""
