"""Layouts whose training steps run on the fake CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """One rank of a tiny model on a mesh.

    Attributes:
        options: more flags of `weft train`, as one text.
        rank: whose step is run.
        measures_layers: whether the cost of one layer is measured, with a second run of more layers.
        checks_late: whether the waits of steps whose reports are late are counted.
        checks_streams: whether races between streams are looked for in every run of the tests.
        is_slow: measured by `make slow` only; other layouts have the same parts.
    """

    mesh: str
    options: str = ""
    model: str = "llama3"
    rank: int = 0
    measures_layers: bool = False
    num_layers: int = 2
    checks_late: bool = True
    checks_streams: bool = False
    is_slow: bool = False

    def __str__(self) -> str:
        mesh = self.mesh or "one"
        words = (self.model, mesh, self.options, f"rank {self.rank}")
        return " ".join(word for word in words if word)

    def flags(self, num_layers: int | None = None) -> list[str]:
        """The flags of `weft train`."""
        mesh = Mesh.parse(self.mesh)
        num_microbatches = 3 if mesh.degree("pp") > 1 else 2
        words = [
            *("--mesh", self.mesh),
            *("--model.name", self.model),
            *("--model.layers", str(num_layers or self.num_layers)),
            *("--data.seq_len", "32"),
            *("--batch.global_size", str(num_microbatches * mesh.degree(("dp", "ep")))),
            *("--batch.micro_size", "1"),
        ]
        return words + self.options.split()


BF16 = "--precision.compute bfloat16"
OFFLOAD = "--parallel.recompute offload --data.seq_len 8192"
PACKED_LENGTH = 2048
PACKED = f"--data.packing documents --data.seq_len {PACKED_LENGTH}"
EXPERTS = "--data.seq_len 64 --model.top_k 2 --model.dim 64 --model.expert_ffn 32 --model.experts"

LAYOUTS = (
    Layout("", measures_layers=True, is_slow=True),
    Layout("", BF16, is_slow=True),
    Layout("", "--parallel.recompute full", is_slow=True),
    Layout("", "--parallel.recompute selective", is_slow=True),
    Layout("", OFFLOAD, num_layers=4, checks_streams=True, is_slow=True),
    Layout(
        "dp2",
        f"{OFFLOAD} --parallel.zero 3 {BF16}",
        num_layers=4,
        checks_late=False,  # as of one device, and its steps take longest
        checks_streams=True,
    ),
    Layout("", f"{PACKED} {BF16}"),
    Layout("", PACKED, is_slow=True),
    Layout("dp2", is_slow=True),
    Layout("dp2", f"--parallel.zero 1 {BF16}", rank=1, is_slow=True),
    Layout("dp2", "--parallel.zero 2", is_slow=True),
    Layout("dp2", f"--parallel.zero 3 {BF16}", checks_streams=True),
    Layout("tp2", rank=1, is_slow=True),
    Layout("tp2", "--parallel.sequence True", measures_layers=True, is_slow=True),
    Layout(
        "tp4",
        "--parallel.sequence True --parallel.tp_overlap True",
        measures_layers=True,
        is_slow=True,
    ),
    Layout("cp2", rank=1, is_slow=True),
    Layout("cp2", "--parallel.context allgather", is_slow=True),
    Layout("cp2", "--parallel.context ulysses", is_slow=True),
    Layout("pp2", rank=1, is_slow=True),
    Layout("pp2", "--pipeline.schedule zero_bubble", is_slow=True),
    Layout("pp2", "--pipeline.schedule zbv --pipeline.chunks 2", num_layers=4, is_slow=True),
    Layout("pp2 dp2 cp2 tp2", "--parallel.sequence True --parallel.zero 1", rank=15),
    Layout("", model="deepseek", is_slow=True),
    Layout("ep2", model="deepseek", measures_layers=True, is_slow=True),
    Layout("ep2 tp2", "--parallel.zero 3", model="deepseek", rank=3, is_slow=True),
    Layout("dp2", f"{BF16} {EXPERTS} 8", model="qwen3-moe", measures_layers=True, is_slow=True),
    Layout("dp2", f"{BF16} {EXPERTS} 128", model="qwen3-moe", measures_layers=True),
    Layout("ep2", f"{BF16} {EXPERTS} 128", model="qwen3-moe", measures_layers=True, is_slow=True),
    Layout(
        "ep2 tp2", f"{BF16} {EXPERTS} 8 --precision.linears fp8", model="qwen3-moe", is_slow=True
    ),
)
