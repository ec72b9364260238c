"""Pipeline schedules as tables of actions, and what reads them: validation, lowering, simulation. No torch."""
