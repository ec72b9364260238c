"""Generated layouts for the typed certificate: families, meshes of up to 64 ranks, and options."""

from __future__ import annotations

from weft_selftest.generated_runs import OPTIONS, SIZES, Choices

LAYOUTS = Choices(
    most_ranks=(64,),
    degrees=(1, 1, 2, 2, 4),
    options={
        **OPTIONS,
        "--data.seq_len": ("16", "32"),
        "--batch.global_size": ("32", "64"),
        "--optim.clip": ("0", "1"),
    },
    sizes={**SIZES, "layers": ("3", "4", "9")},
    losses=("cross_entropy", "cross_entropy", "cross_entropy", "dpo"),
)
