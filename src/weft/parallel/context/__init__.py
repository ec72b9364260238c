"""Attention over sequences that are cut along their length: how keys and values meet the queries of other ranks."""
