"""Profiles: what each rank did in some steps, recorded while it trains and read back with the records of the others."""
