"""The rules of a run that need data, folders, devices or torch, one module a subject; `start_checks` binds them."""
