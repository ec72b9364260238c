"""The commands of this package, as `weft` finds them by entry points. Imports no torch, and no command before it runs."""

from __future__ import annotations

from weft.commands.command import Command, imported

PURPOSE = "before a run"

PLAN = Command(
    "[CONFIG.toml] --devices 256 --hardware h100 [--json] [--key value ...]",
    "search the best layout for a number of devices",
    imported("weft_plan.commands.plan:plan"),
    purpose=PURPOSE,
    modes=("--calibrate",),
)
CALIBRATE = Command(
    "--calibrate --write mine.toml",
    "fit the constants of this machine to short runs, and write them to its hardware file",
    imported("weft_plan.commands.calibrate:calibrate"),
    purpose=PURPOSE,
)
BENCH = Command(
    'comm|compute [--mesh "dp2 tp2"] [--write file.toml]',
    "measure collectives and kernels here, and write a hardware file",
    imported("weft_plan.commands.bench:bench"),
    purpose=PURPOSE,
)
SCHEDULE = Command(
    "[NAME ...] [--compare | --search] [--ranks 4 ...]",
    "draw, compare or search pipeline schedules",
    imported("weft_plan.commands.schedule:schedule"),
    purpose=PURPOSE,
)
SIMULATE = Command(
    "[CONFIG.toml | MODEL.py] [--hardware h100] [--jitter 5%] [--json] [--key value ...]",
    "predict the step of a run: timeline, jitter, failures",
    imported("weft_plan.commands.simulate:simulate_run"),
    purpose=PURPOSE,
)
TRACE = Command(
    "RUN [--hardware mine.toml] [--step 11] [--json] [--svg x.svg] [--perfetto x.json]",
    "profiled steps, measured and predicted: waits, slow ranks",
    imported("weft_plan.commands.trace:trace"),
    purpose="train",
)
