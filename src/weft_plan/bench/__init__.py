"""Measured speeds of this machine: collectives, matrix products, attention, memory, launches."""
