"""Optimizers: the contract of an update rule, weft's own rules, parameter groups, and the check of a user's class."""
