"""The commands of this package, as `weft` finds them by entry points. Imports no torch, and no command before it runs."""

from __future__ import annotations

from weft.commands.command import Command, imported

PURPOSE = "be sure of the numbers"

CHAOS = Command(
    '[CONFIG.toml] [--faults N] [--layout "dp3 zero3" ...] [--kinds kill,stop]',
    "inject faults into runs and compare them with runs without",
    imported("weft_selftest.commands.chaos:chaos"),
    purpose=PURPOSE,
)
MUTANTS = Command(
    "--mutants [--only NAME,...]",
    "plant faults that a proof must report",
    imported("weft_selftest.commands.prove_mutants:prove_mutants"),
    purpose=PURPOSE,
)
SWEEP = Command(
    "--sweep MINUTES [--checks proof|steps|each]",
    "prove generated healthy layouts",
    imported("weft_selftest.commands.prove_mutants:prove_sweep"),
    purpose=PURPOSE,
)
