"""Mutation tests of the proof: faults described as data, planted one at a time, each of which a proof must report."""
