"""Commands of the planner: `weft plan`, `bench`, `schedule` and `simulate`, and the choice of `mesh = "auto"`."""
