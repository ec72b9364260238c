"""Export by definition: adapters merged by their equation, files read by the family's rules, without the code of the import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from weft.config.lora import LORA_A, LORA_B, LORA_M, adapted_linear
from weft.config.schema import LoraConfig
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.hf.match import match_folder

WEIGHT = ".weight"


def merged_plainly(whole: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Parameters without adapters, by definition: W + (alpha / rank) B A, of DoRA with rows of the
    norms |W| + d.
    """
    found = {}
    for name, value in whole.items():
        if adapted_linear(name) is not None:
            continue
        linear = name.removesuffix(WEIGHT)
        a = whole.get(linear + LORA_A)
        if a is not None and linear != name:
            product = whole[linear + LORA_B].double() @ a.double()
            total = value.double() + lora.alpha / lora.rank * product
            if lora.dora:
                norms = torch.linalg.vector_norm(value.double(), dim=1) + whole[linear + LORA_M]
                total = torch.nn.functional.normalize(total, dim=1) * norms[:, None]
            value = total.to(value.dtype)
        found[name] = value
    return found


def read_plainly(folder: Path, cfg: ModelConfig) -> dict[str, Tensor]:
    """The parameters in the files of a folder, without the code that imports: whole tensors, put
    together by the rules of the family.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    found = {}
    for name, source in match_folder(folder, cfg).params.items():
        whole = torch.empty(source.shape, dtype=tensors[source.tensors[0]].dtype)
        for copy in source.copies(Box.whole(source.shape)):
            part = tensors[copy.source][copy.box.slices]
            whole[copy.at] = part.T if copy.transposed else part
        found[name] = whole
    return found
