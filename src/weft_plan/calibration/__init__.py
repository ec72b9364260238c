"""Fit of the constants of a device to measured steps, with their uncertainty."""
