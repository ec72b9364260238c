"""Nineteen models of users under five layouts: each equals one device within 1e-9, or is rejected in one line.

`python -m tests.user_models.sweep` prints the table of docs/your-model.md.
"""

from __future__ import annotations

from pathlib import Path

from weft.config.load import load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run, plan_of
from weft.errors import UserError
from weft.models import FAMILIES
from weft.prove.proof import prove
from weft.prove.subject import Subject
from weft.train.model_checks import check_user_model

FOLDER = Path(__file__).parent
MODELS = {
    "fused_block": "nanoGPT's fused block",
    "parallel_block": "GPT-J's parallel block",
    "vit": "a ViT",
    "shared_layer": "ALBERT's shared layer",
    "scan": "Mamba's scan",
    "latents": "Perceiver's latents",
    "batch_norm": "conv net with BatchNorm",
    "head_bias": "T5's per-head bias",
    "shared_router": "mixture, shared router",
    "torch_attention": "nn.MultiheadAttention, with dropout",
    "torch_encoder": "nn.TransformerEncoderLayer, with dropout",
    "weight_norm": "weight-normed linear",
    "dropout": "dropout of every kind",
    "encoder_decoder": "an encoder-decoder, named arrays",
    "diffusion": "a diffusion transformer, named arrays",
    "unet": "a U-Net, named arrays",
    "unet_norm": "a U-Net with BatchNorm",
    "resnet": "a ResNet",
    "mobilenet": "a MobileNet, with dropout",
}
FILES = {
    "unet_norm": ("unet", "--model.norm", "batch"),
    "bias_before_norm": ("batch_norm", "--model.bias", "True"),
    "frozen_norm": ("resnet", "--model.frozen", "True"),
}
"""Model -> the name of its file, and further words; where they are not its own name alone."""
BY_MICRO_BATCH = ("batch_norm", "unet_norm", "resnet", "mobilenet", "frozen_norm")
"""Models that normalise micro-batches, which need two samples."""
LAYOUTS = {
    "tp2": ("--mesh", "tp2"),
    "tp2 sp": ("--mesh", "tp2", "--parallel.sequence", "True"),
    "cp2": ("--mesh", "cp2"),
    "pp2": ("--mesh", "pp2"),
    "dp2 zero3": ("--mesh", "dp2", "--parallel.zero", "3"),
}
SIZES = ("--batch.global_size", "4", "--data.seq_len", "16", "--optim.warmup", "0")


def checked(name: str, layout: str) -> Run:
    """The run of a model under a layout, checked as a command checks it.

    Raises:
        UserError: it is rejected.
    """
    is_one = "dp2" in layout and name not in BY_MICRO_BATCH
    micro = ("--batch.micro_size", "1" if is_one else "2")
    file, *words = FILES.get(name, (name,))
    argv = [str(FOLDER / f"{file}.py"), *LAYOUTS[layout], *SIZES, *micro, *words]
    run = load(argv, FAMILIES)
    faults = run_checks(run, config_checks)
    if faults:
        raise UserError(*faults)
    check_user_model(FAMILIES[run.model.name], run.model, plan_of(run))
    return run


def outcome(name: str, layout: str, *, steps: int = 3) -> float | str:
    """The largest relative difference of the loss, a gradient or a parameter to one device in
    float64, or the line that rejects the model.
    """
    try:
        run = checked(name, layout)
    except UserError as error:
        return str(error.faults[0])
    report = prove(Subject.of(run, steps=steps).in_float64())
    assert report.holds, report
    (comparison,) = report.passes
    return max(bound.largest for bound in comparison.bounds)


def main() -> None:
    """Print the table, and each line of rejection."""
    lines: dict[str, list[str]] = {}
    print(f"| model | {' | '.join(LAYOUTS)} |")  # noqa: T201 - the table
    print("|" + "---|" * (len(LAYOUTS) + 1))  # noqa: T201
    for name, title in MODELS.items():
        cells = []
        for layout in LAYOUTS:
            found = outcome(name, layout)
            cells.append("rejected" if isinstance(found, str) else f"{found:.0e}")
            if isinstance(found, str):
                lines.setdefault(found, []).append(f"{name}, {layout}")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)  # noqa: T201
    for line, places in lines.items():
        print(f"{'; '.join(places)}\n    {line}")  # noqa: T201


if __name__ == "__main__":
    main()
