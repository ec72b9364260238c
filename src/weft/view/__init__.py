"""Text and terminal output: pictures of timelines, progress of runs, quantities with units. No torch."""
