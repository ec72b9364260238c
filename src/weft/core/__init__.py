"""Everything that thinks: pure data and pure functions, no torch."""
