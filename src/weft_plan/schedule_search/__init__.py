"""Comparison of schedules on one scale, and the search for the shortest table under memory limits. No torch."""
