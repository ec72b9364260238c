"""Public programs of other people on weft: their own loss against the chain of blocks, and each layout against one device.

`python -m tests.programs_of_others.outcomes [PROGRAM ...] [-- COLUMN ...]` appends to docs/results/programs.jsonl.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import weft
from weft.core.input_spec import TARGETS
from weft.data.arrays import drawn_arrays
from weft.errors import UserError, WeftError
from weft.models.common.batch import array_batch, forward, token_batch
from weft.models.common.layers import Loss
from weft.models.user_chain import chain_of
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.subject import ProofCase
from weft.python_api import checked_run

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "docs" / "results" / "programs.jsonl"
MARKER = "# weft"
"""What begins the part of a file that its program does not have, and marks lines that were changed."""
TOLERANCE = 1e-9
"""Relative, in float64, which rounds at 1e-16."""
ROWS, LENGTH = 4, 16
SMALL: Mapping[str, Any] = {
    "batch.global_size": ROWS, "batch.micro_size": 2, "data.seq_len": LENGTH, "optim.warmup": 0, "transport": "threads",
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A program of this folder.

    Attributes:
        title: as the table calls it.
        dropout: fields of its config that switch random parts on.
        varied: fields of its config with other values than their defaults.
        reads_tokens: whether it is a language model, which can generate.
    """

    title: str
    dropout: Mapping[str, Any] = field(default_factory=dict)
    varied: Mapping[str, Any] = field(default_factory=dict)
    reads_tokens: bool = False


PROGRAMS: Mapping[str, Program] = {
    "nanogpt": Program("nanoGPT", {"dropout": 0.1}, {"bias": False}, reads_tokens=True),
    "mingpt": Program("minGPT", {"attn_pdrop": 0.1, "resid_pdrop": 0.1}, {"n_head": 4}, True),
    "nanochat": Program("nanochat", {}, {"n_layer": 3, "n_kv_head": 4}, True),
    "dit": Program("DiT", {}, {"patch_size": 4, "num_heads": 2}),
    "mamba_minimal": Program("mamba-minimal", {}, {"bias": True, "vocab_size": 257}, True),
    "x_transformers": Program("x-transformers, a decoder", {"dropout": 0.1}, {"heads": 2}, True),
    "vit_lucidrains": Program("ViT of vit-pytorch", {"dropout": 0.1}, {"pool": "mean"}),
    "vit_timm": Program("ViT of timm", {"drop_path_rate": 0.2}, {"frozen_stem": True}),
    "resnet": Program("ResNet of torchvision", {}, {"zero_init_residual": False}),
    "convnext": Program("ConvNeXt", {"drop_path_rate": 0.2}, {"layer_scale_init_value": 0.0}),
    "whisper": Program("Whisper", {}, {"n_text_layer": 1}),
    "t5": Program("T5", {"dropout_rate": 0.1}, {"tie_word_embeddings": False}),
    "diffusion_unet": Program("a diffusion U-Net", {}, {"groups": 1}),
    "bert": Program("BERT, two losses", {"hidden_dropout_prob": 0.1}, {"vocab_size": 67}),
    "word_language_model_rnn": Program(
        "word language model, LSTM", {"dropout": 0.1}, {"rnn_type": "GRU", "tie_weights": False}, True
    ),
    "word_language_model_transformer": Program(
        "word language model, transformer", {"dropout": 0.1}, {"ntoken": 259}, True
    ),
    "cs336": Program("CS336 assignment 1", {}, {"num_heads": 2}, True),
}  # fmt: skip
FLOAT64 = {f"precision.{part}": "float64" for part in ("params", "compute", "reduce")}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp2 zero 3": {"mesh": "dp2", "parallel.zero": 3},
    "fsdp2": {"mesh": "fsdp2", "parallel.zero": 2},
    "pp2 zero_bubble": {"mesh": "pp2", "pipeline.schedule": "zero_bubble"},
    "tp2": {"mesh": "tp2"},
    "tp2 one sequence": {"mesh": "tp2", "batch.micro_size": 1},
    "tp2 sequence": {"mesh": "tp2", "parallel.sequence": True},
    "cp2": {"mesh": "cp2"},
    "pp2 dp2 tp2": {"mesh": "pp2 dp2 tp2"},
    "dp2 recompute selective": {"mesh": "dp2", "parallel.recompute": "selective"},
    "pp2 recompute full": {"mesh": "pp2", "parallel.recompute": "full"},
    "dropout": {"mesh": "pp2 dp2"},
    "varied": {"mesh": "pp2 dp2", "parallel.zero": 1},
    "dp2 bfloat16": {"mesh": "dp2", "precision.compute": "bfloat16"},
    "resume": {"mesh": "dp2", **FLOAT64},
    "generation": {"mesh": "pp2"},
}
PARTS = {"resume": "resume", "generation": "generate"}
OWN = "own loss"
COLUMNS = (OWN, *LAYOUTS)


@dataclass(frozen=True)
class Outcome:
    """What came of one column of a program.

    Attributes:
        word: "equal", "rejected", "wrong", "failed", or "none" where there is nothing to compare.
        text: largest relative difference, or the line.
    """

    word: str
    text: str = ""


def outcome(name: str, column: str, *, steps: int = 1, file: Path | None = None) -> Outcome:
    """A column of a program; any error but a rejection is "failed"."""
    program = PROGRAMS[name]
    fields = {"dropout": program.dropout, "varied": program.varied}.get(column, {})
    lacks_dropout = column == "dropout" and not program.dropout
    if lacks_dropout or (column == "generation" and not program.reads_tokens):
        return Outcome("none")
    try:
        if column == OWN:
            difference = own_difference(name)
            return Outcome("equal" if difference <= TOLERANCE else "wrong", f"{difference:.0e}")
        keys = {
            **SMALL,
            **LAYOUTS[column],
            **{f"model.{key}": value for key, value in fields.items()},
        }
        report = proven(file or FOLDER / f"{name}.py", keys, column=column, steps=steps)
    except UserError as error:
        return Outcome("rejected", str(error.faults[0]))
    except WeftError as error:
        return Outcome("failed", str(error).splitlines()[0])
    except Exception as error:  # noqa: BLE001 - a traceback is what the table counts
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        return Outcome("failed", text.splitlines()[0])
    if not report.holds:
        return Outcome("wrong", (report.error or str(report.first)).splitlines()[0])
    return Outcome("equal", f"{largest(report):.0e}")


def proven(file: Path, keys: Mapping[str, Any], *, column: str, steps: int) -> ProofReport:
    """The proof of a column.

    Raises:
        UserError: it is rejected.
    """
    if column in PARTS:
        return weft.prove(dict(keys), model=str(file), first=2, what=(PARTS[column],))
    run = checked_run(dict(keys), model=str(file))
    subject = ProofCase(run, steps).opened()
    return prove(subject if column == "dp2 bfloat16" else subject.in_float64())


def largest(report: ProofReport) -> float:
    """The largest difference of any tensor."""
    return max((bound.largest for one in report.passes for bound in one.bounds), default=0.0)


def own_difference(name: str, **fields: Any) -> float:
    """The largest relative difference of the loss, and of all gradients, between the program's own
    training step and the chain of blocks with weft's sum of the loss, in float64.
    """
    program = importlib.import_module(f"{__package__}.{name}")
    torch.manual_seed(0)
    config = program.Config(**fields)
    model = program.blocks(config).double().train()
    with torch.no_grad():  # what starts at zero would hide what it is multiplied with
        for param in model.parameters():
            param += 0.05 * torch.randn_like(param)
    blocks = chain_of(program.blocks_of(model), name=name)
    blocks.setdefault("loss", Loss())
    sample, batch = _batch(program, config, model)
    own = _with_gradients(model, lambda: program.train_loss(model, sample))
    chain = _with_gradients(model, lambda: forward(blocks, batch) / batch.num_targets())
    return max(map(_relative, own, chain))


def _batch(program: Any, config: Any, model: nn.Module) -> tuple[dict[str, Tensor], Any]:
    """The sample as the program's training loop has it, and as weft has it."""
    if hasattr(program, "INPUTS"):
        arrays = drawn_arrays(np.arange(ROWS), program.INPUTS(config), seed=0)
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        wide = {key: x.double() if x.is_floating_point() else x for key, x in tensors.items()}
        return wide, array_batch(wide)
    ids = torch.randint(0, _vocab(model), (ROWS, LENGTH + 1))
    batch = token_batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return {"inputs": batch.inputs, TARGETS: batch.targets}, batch


def _vocab(model: nn.Module) -> int:
    return next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))


def _with_gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    """The loss, and the gradients of all parameters that are trained."""
    model.zero_grad()
    value = loss()
    value.backward()
    params = [param for param in model.parameters() if param.requires_grad]
    assert all(param.grad is not None for param in params), "every parameter is used"
    return [value.detach(), *(param.grad.clone() for param in params)]


def _relative(one: Tensor, other: Tensor) -> float:
    scale = max(float(one.abs().max()), 1e-6)
    return float((one - other).abs().max()) / scale


def main(words: Sequence[str]) -> int:
    """Run the programs that are named, or all."""
    names, columns = list(words), list(COLUMNS)
    if "--" in names:
        place = names.index("--")
        names, columns = names[:place], names[place + 1 :]
    torch.set_num_threads(1)
    for name in names or PROGRAMS:
        for column, found in _outcomes(name, columns):
            record = {"program": name, "column": column, **asdict(found)}
            with RESULTS.open("a", encoding="utf-8") as file:
                print(json.dumps(record), file=file)
            print(name, column, found.word, found.text, sep="; ", flush=True)  # noqa: T201 - progress
    return 0


def _outcomes(name: str, columns: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    for column in columns:
        yield column, outcome(name, column)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
