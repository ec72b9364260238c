"""From a config to ranks that train or are proved: checks of its environment, the proof before, ranks, records of the end."""
