"""Simulation of a run on a named device: times of a schedule table, jitter, failures."""
