"""Users' code: which files are theirs, what a value reaches, what is read meanwhile, and one identity of all that. No torch."""
