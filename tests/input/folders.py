"""Small valid folders to damage: a Hugging Face model, prepared data, a run with a checkpoint; and forged safetensors files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.generate.stored import write_checkpoint, write_run
from weft.data.prepare import PrepareOptions, prepare

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (32, 8),
    f"{LAYER}input_layernorm.weight": (8,),
    f"{LAYER}post_attention_layernorm.weight": (8,),
    f"{LAYER}self_attn.q_proj.weight": (8, 8),
    f"{LAYER}self_attn.k_proj.weight": (4, 8),
    f"{LAYER}self_attn.v_proj.weight": (4, 8),
    f"{LAYER}self_attn.o_proj.weight": (8, 8),
    f"{LAYER}mlp.gate_proj.weight": (16, 8),
    f"{LAYER}mlp.up_proj.weight": (16, 8),
    f"{LAYER}mlp.down_proj.weight": (8, 16),
}
Q = f"{LAYER}self_attn.q_proj.weight"
NORM = "model.norm.weight"


def write_base(folder: Path) -> None:
    """`hf`, `prep`, `text.txt` and `run` (one checkpoint, one recorded step) below `folder`."""
    write_hf(folder / "hf")
    (folder / "text.txt").write_text("some text to train on\n" * 60)
    options = PrepareOptions(inputs=(str(folder / "text.txt"),))
    prepare(options, folder / "prep")
    run = write_run(folder / "run")
    write_checkpoint(folder / "run", run)
    events = [
        {"event": "run", "steps": 3},
        {"event": "step", "step": 1, "loss": 5.5, "grad_norm": 1.0},
        {"event": "end", "status": "finished", "steps": 1, "seconds": 1.0},
    ]
    lines = [json.dumps(event) + "\n" for event in events]
    (folder / "run" / "events.jsonl").write_text("".join(lines))


def write_hf(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    header, data = tensors()
    write_safetensors(folder / "model.safetensors", header, data)


def tensors() -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file of the model."""
    header: dict[str, Any] = {}
    data = b""
    for name, shape in SHAPES.items():
        values = np.full(shape, 0.01, "<f4").tobytes()
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": offsets}
        data += values
    return header, data


def write_safetensors(path: Path, header: Any, data: bytes, *, length: int | None = None) -> None:
    if isinstance(header, bytes):
        text = header
    else:
        text = json.dumps(header).encode()
    size = (len(text) if length is None else length).to_bytes(8, "little")
    path.write_bytes(size + text + data)


def edit_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A function that changes the header of hf/model.safetensors."""

    def edit(folder: Path) -> None:
        header, data = tensors()
        change(header)
        write_safetensors(folder / "hf" / "model.safetensors", header, data)

    return edit


def edit_json(name: str, **values: Any) -> Callable[[Path], None]:
    """A function that sets keys of a JSON file."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        content.update(values)
        (folder / name).write_text(json.dumps(content))

    return edit


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    """A function that writes a file."""

    def write_file(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise AssertionError(f"{path} is a folder")
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write_file


def forge_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A function that changes the manifest of the checkpoint and writes a fitting checksum."""

    def forge(folder: Path) -> None:
        path = folder / "run/ckpt/step-000003/manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        write_manifest(folder, json.dumps(manifest).encode())

    return forge


def write_manifest(folder: Path, text: bytes) -> None:
    path = folder / "run/ckpt/step-000003/manifest.json"
    path.write_bytes(text)
    digest = f"{hashlib.sha256(text).hexdigest()}  manifest.json\n"
    path.with_name("manifest.json.sha256").write_text(digest)
