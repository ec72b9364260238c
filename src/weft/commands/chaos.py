"""`weft chaos`: inject faults into runs of a tiny model on several layouts, and compare with runs without. Imports no torch."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from pydantic import Field

from weft.commands.chaos_report import ChaosReport, TrialResult
from weft.commands.console import (
    print_result,
    set_openmp_policy,
    show_help,
    take_flag,
    wants_help,
)
from weft.config import flags
from weft.config.schema import ConfigSection
from weft.core.dimension import sequence_axes, token_axes
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED, EXIT_OK, Fault, UserError
from weft.run.fault_plan import FAULT_KINDS, FaultKind, deal
from weft.run.rank_status import PHASES, Phase

NAME = "weft chaos"
USAGE = '[CONFIG.toml] [--faults N] [--layout "dp3 zero3" ...] [--kinds kill,stop]'
LINE = "inject faults into training runs and compare them with runs without"

Claim = Literal["bit_identical", "no_hang", "survived", "injected", "no_needless_restart"]
CLAIMS: tuple[Claim, ...] = get_args(Claim)

LAYOUTS = (
    "dp3",
    "dp3 zero3",
    "dp4 zero2",
    "pp2 dp3",
    "dp3 tp2",
    "dp3 cp2",
    "dp2 ep2 moe",
    "pp2 tp2 zero1",
)
"""The default layouts."""
TEXT = "the quick brown fox jumps over the lazy dog. " * 400
SIZES: dict[str, int] = {
    "model.layers": 2,
    "model.dim": 16,
    "model.heads": 2,
    "model.kv_heads": 2,
    "data.seq_len": 8,
    "batch.micro_size": 1,
}
DENSE: dict[str, str | int] = {"model.name": "llama3", "model.ffn": 32}
MIXTURE: dict[str, str | int] = {
    "model.name": "qwen3-moe",
    "model.head_size": 8,
    "model.experts": 4,
    "model.top_k": 2,
    "model.expert_ffn": 16,
}
SEQUENCES_A_RANK = 2

T = TypeVar("T", bound=str)


class ChaosOptions(ConfigSection):
    """Which faults are injected, and where."""

    faults: int = Field(24, ge=1, le=100_000, description="number of faults over all layouts")
    kinds: str = Field("", description=f"of {', '.join(FAULT_KINDS)}; empty: all")
    phases: str = Field("", description=f"of {', '.join(PHASES)}; empty: all")
    layout: str = Field(
        "", description="mesh, with zero1 to zero3, and moe for a mixture of experts; repeatable"
    )
    seed: int = Field(0, ge=0, description="of the choice of faults, ranks and order")
    claims: str = Field(
        ",".join(CLAIMS),
        description=f"exit code 1 unless they hold (or --assert): {', '.join(CLAIMS)}",
    )
    format: Literal["text", "json"] = Field(
        "text", description="json: one object; --json for short"
    )


@dataclass(frozen=True)
class ChaosLayout:
    """A layout of a run: its mesh, ZeRO stage, and whether its model is a mixture of experts."""

    text: str
    mesh: Mesh
    zero: int
    is_mixture: bool

    @staticmethod
    def parse(text: str) -> ChaosLayout:
        """`dp3 zero3`, `dp2 ep2 moe`.

        Raises:
            MeshError: the mesh cannot be read.
        """
        axes: list[str] = []
        zero, is_mixture = 0, False
        for word in text.split():
            if word == "moe":
                is_mixture = True
            elif word in ("zero1", "zero2", "zero3"):
                zero = int(word[-1])
            else:
                axes.append(word)
        return ChaosLayout(text, Mesh.parse(" ".join(axes)), zero, is_mixture)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different sequences."""
        count = 1
        for axis, degree in self.mesh.axes:
            if axis in sequence_axes():
                count *= degree
        return count

    @property
    def finds_corruption(self) -> bool:
        """Whether a flipped bit in a reduced gradient makes replicas differ."""
        return self.zero == 0 and not self.is_mixture and self.num_data_ranks > 1

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """Axes over which gradients are reduced."""
        return token_axes()

    def words(self, config: Sequence[str], *, source: Path, out: Path) -> list[str]:
        """The command line of a run, without its faults.

        Args:
            config: words of the user's own config, or none: then the model is tiny.
        """
        values: dict[str, object] = {}
        if not config:
            model = MIXTURE if self.is_mixture else DENSE
            values = {**SIZES, **model, "data.source": source, "eval.source": source}
            values["batch.global_size"] = SEQUENCES_A_RANK * self.num_data_ranks
        values |= {
            "mesh": self.mesh,
            "parallel.zero": self.zero,
            "out": out,
            "guard.digest_every": 1,
            "guard.stragglers": 0,
            "eval.every": 4 if not config else 0,
            "eval.batches": 1,
            "sample": 0,
            "save.every": 8,
            "save.keep": 3,
            "save.memory_every": 2,
        }
        words = list(config)
        for name, value in values.items():
            words += [f"--{name}", str(value)]
        return words


def chaos(words: Sequence[str]) -> int:
    """Inject faults, compare and report; exit code 1 where a claim does not hold."""
    if wants_help(words):
        return show_help(ChaosOptions(), f"{NAME} {USAGE}", LINE)
    layout_texts, rest = _take_layouts(words)
    config = [rest.pop(0)] if rest and rest[0].endswith(".toml") else []
    option_words: list[str] = []
    for word in rest:
        option_words += ("--format", "json") if word == "--json" else (word,)
    option_words = ["--claims" if word == "--assert" else word for word in option_words]
    options = flags.read_config(option_words, ChaosOptions)
    kinds: tuple[FaultKind, ...] = _choices("kinds", options.kinds, FAULT_KINDS)
    phases: tuple[Phase, ...] = _choices("phases", options.phases, PHASES)
    claims: tuple[Claim, ...] = _choices("assert", options.claims, CLAIMS)
    layouts = [ChaosLayout.parse(text) for text in layout_texts or LAYOUTS]
    dealt = deal(
        options.faults,
        kinds=kinds,
        phases=phases,
        finds_corruption=[layout.finds_corruption for layout in layouts],
        seed=options.seed,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_openmp_policy()
    from weft.commands.chaos_trial import run_trial  # imports torch, and so comes after all checks

    results: list[TrialResult] = []
    with _private_folder() as folder:
        source = folder / "text.txt"
        source.write_text(TEXT, encoding="ascii")
        for number, (layout, cells) in enumerate(zip(layouts, dealt, strict=True)):
            if not cells:
                continue
            trial = run_trial(
                layout,
                cells,
                lambda out, layout=layout: layout.words(config, source=source, out=out),
                folder=folder / f"layout{number}",
                seed=options.seed + number,
            )
            results.append(trial)
            if options.format == "text":
                print_result(trial.line())
    report = ChaosReport(options.faults, options.seed, tuple(results))
    if options.format == "json":
        print_result(json.dumps(report.to_json(claims)))
    else:
        print_result("\n".join(report.lines(claims)))
    return EXIT_OK if all(report.holds(claim) for claim in claims) else EXIT_FAILED


@contextmanager
def _private_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as folder:
        yield Path(folder)


def _take_layouts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of every `--layout`, and all other words."""
    layouts: list[str] = []
    rest = list(words)
    while "--layout" in rest:
        flag, rest = take_flag("--layout", rest)
        if len(flag) < 2:
            raise UserError(Fault("layout", "has no value", fix='--layout "dp3 zero3"'))
        layouts.append(flag[1])
    return layouts, rest


def _choices(key: str, text: str, known: Sequence[T]) -> tuple[T, ...]:
    """The names in a list separated by commas; all of them if it is empty.

    Raises:
        UserError: a name is unknown.
    """
    given = text.replace(",", " ").split()
    for name in given:
        if name not in known:
            raise UserError(Fault(key, "is unknown", repr(name), ", ".join(known)))
    return tuple(name for name in known if name in given or not given)
