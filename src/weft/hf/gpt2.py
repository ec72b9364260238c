"""Owns the tensors of GPT-2: Conv1D holds weights as [in, out], and q, k, v side by side."""

from __future__ import annotations

from weft.hf.table import Row, Share, WeightTable, rows, same

_OURS, _THEIRS = "layer{layer}", "transformer.h.{layer}"
_LINEARS = {"attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_NORMS = {"attn_norm": "ln_1", "mlp_norm": "ln_2"}

TABLE = WeightTable(
    family="gpt2",
    places=lambda cfg: {"layer": same(cfg.layers)},
    rows=(
        Row("embed.tok.weight", "transformer.wte.weight"),
        Row("embed.pos.weight", "transformer.wpe.weight"),
        *(
            Row(f"{_OURS}.attn.{name}.weight", f"{_THEIRS}.attn.c_attn.weight", Share(i, 3, dim=1), transposed=True)
            for i, name in enumerate("qkv")
        ),
        *(
            Row(f"{_OURS}.attn.{name}.bias", f"{_THEIRS}.attn.c_attn.bias", Share(i, 3, dim=0))
            for i, name in enumerate("qkv")
        ),
        *(
            Row(f"{_OURS}.{our}.weight", f"{_THEIRS}.{their}.weight", transposed=True)
            for our, their in _LINEARS.items()
        ),
        *rows(_OURS, _THEIRS, {f"{our}.bias": f"{their}.bias" for our, their in _LINEARS.items()}),
        *rows(_OURS, _THEIRS, {f"{our}.weight": f"{their}.weight" for our, their in _NORMS.items()}),
        *rows(_OURS, _THEIRS, {f"{our}.bias": f"{their}.bias" for our, their in _NORMS.items()}),
        Row("head.norm.weight", "transformer.ln_f.weight"),
        Row("head.norm.bias", "transformer.ln_f.bias"),
        Row("head.proj.weight", "lm_head.weight"),
    ),
    redundant=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    prefix="transformer.",
)
