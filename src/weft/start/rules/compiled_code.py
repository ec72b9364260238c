"""Whether a user's model may compute other numbers compiled than as it is written, in a run that nothing proves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.code.identity import CodeIdentity
from weft.config.run import Run, plan_of
from weft.errors import Fault
from weft.layout.compilation import KEY, OFF
from weft.models import FAMILIES
from weft.start.environment import has_gpus
from weft.start.proved_runs import is_proved


def compiled_code_faults(run: Run, environ: Mapping[str, str]) -> Iterator[Fault]:
    """Code that asks whether it is compiled may compute anything where it is: a run that compiles it
    needs the proof.
    """
    if run.compile == "off" or is_proved(run, environ):
        return
    if not plan_of(run).compiles_blocks("cuda" if has_gpus(run.device) else "cpu"):
        return
    code: CodeIdentity = getattr(FAMILIES[run.model.name], "code", CodeIdentity())
    for name in code.asks_compiler[:1]:
        yield Fault(
            KEY,
            f"{name} asks whether it is compiled, so it may compute other numbers, and nothing is proved",
            got=run.compile,
            need="off",
            fix=f"{OFF}, or --prove.before always",
        )
