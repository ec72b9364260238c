"""Comparison of a layout, or of a recorded run, with one device."""
