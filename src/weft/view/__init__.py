"""Everything that draws: reads core data, no torch."""
