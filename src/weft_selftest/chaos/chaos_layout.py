"""Layouts of `weft chaos`: mesh, ZeRO stage and model, and the command line of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.core.dimension import sequence_axes, token_axes
from weft.core.mesh import Mesh

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
        return ChaosLayout(
            text=text, mesh=Mesh.parse(" ".join(axes)), zero=zero, is_mixture=is_mixture
        )

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

    def words(self, out: Path, *, config: Sequence[str], source: Path) -> list[str]:
        """The command line of a run into `out`, without its faults.

        Args:
            config: words of the user's own config, or none: then the model is tiny.
            source: the data of a tiny model.
        """
        values: dict[str, object] = {}
        if not config:
            model = MIXTURE if self.is_mixture else DENSE
            values = {**SIZES, **model, "data.source": source, "eval.source": source}
            values |= {"eval.every": 4, "eval.batches": 1}
            values["batch.global_size"] = SEQUENCES_A_RANK * self.num_data_ranks
        else:
            values["eval.every"] = 0
        values |= {
            "mesh": self.mesh,
            "parallel.zero": self.zero,
            "out": out,
            "guard.digest_every": 1,
            "guard.stragglers": 0,
            "sample": 0,
            "sample_every": 0,
            "alert.command": None,
            "alert.url": None,
            "save.every": 8,
            "save.keep": 3,
            "save.memory_every": 2,
        }
        words = list(config)
        for name, value in values.items():
            words += [f"--{name}", str(value)]
        return words
