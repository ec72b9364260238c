"""weft_plan: what a run will take before it starts: layouts are searched, links and kernels measured, schedules compared.

It stands on `weft`, which finds its commands (`weft plan`, `bench`, `schedule`, `simulate`) and the
search behind `mesh = "auto"` by entry points and never imports it.
"""
