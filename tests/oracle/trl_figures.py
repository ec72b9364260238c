"""Writes tests/golden/trl.json: the tokens, masks, losses and rewards of TRL's trainers on the records of trl_files.

    pip install trl==1.16.0, then: python -m tests.oracle.trl_figures

Each step trains on all records of a file, so that their order does not matter. TRL's products of the
head are widened to float64; what it logs stays as it is.
"""

from __future__ import annotations

import copy
import json
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.oracle.trl_files import CASES, LR, STEPS, TrlCase, model_folder, records_of_files
from weft.prove.against.float64 import WIDE_NAMES, compute_in_float64

GOLDEN = Path(__file__).parents[1] / "golden" / "trl.json"
LOGGED = ("kl", *(f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")))
ARGUMENTS = {
    "num_train_epochs": STEPS,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "max_length": 128,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
}


def widen(holder: Any) -> None:
    """Let the functions of a module and of its classes compute in float64 where they name float32."""
    if isinstance(holder, types.ModuleType):
        vars(holder)["double"] = float  # the builtin, by its new name
    for value in list(vars(holder).values()):
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            names = tuple(WIDE_NAMES.get(name, name) for name in function.__code__.co_names)
            function.__code__ = function.__code__.replace(co_names=names)
        elif isinstance(value, type) and value.__module__ == getattr(holder, "__name__", ""):
            widen(value)


def figures_of(case: TrlCase, folder: Path) -> dict[str, Any]:
    """What a trainer of TRL reads, computes in each step, and logs."""
    import datasets
    import trl
    from transformers import AutoTokenizer, LlamaForCausalLM
    from trl.experimental import orpo

    source = orpo if case.trainer == "ORPO" else trl
    records = records_of_files()[case.file]
    if case.trainer == "KTO":
        # The other answer is that of the record before in TRL, and of the record behind in weft.
        records = records[::-1]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    compute_in_float64(model)
    has_reference = case.trainer in ("DPO", "KTO")
    trainer = getattr(source, f"{case.trainer}Trainer")(
        model=model,
        args=getattr(source, f"{case.trainer}Config")(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=len(records),
            **ARGUMENTS,
            **case.values,
        ),
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(folder, pad_token="</s>"),
        **({"ref_model": copy.deepcopy(model)} if has_reference else {}),
    )
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def noted(*args: Any, **values: Any) -> Any:
        loss = compute_loss(*args, **values)
        losses.append(loss.item())
        return loss

    trainer.compute_loss = noted
    batch = trainer.data_collator([copy.deepcopy(dict(row)) for row in trainer.train_dataset])
    trainer.train()
    logged = [
        {name: number for name, number in entry.items() if name in LOGGED}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    documents = list(_documents(case, batch))
    if case.trainer == "KTO":
        documents.reverse()
    return {"losses": losses, "logged": logged, "documents": documents}


def _documents(case: TrlCase, batch: Any) -> Iterator[list[Any]]:
    """Tokens and mask of the documents of each record, without padding; nothing of packed rows."""
    kinds: list[tuple[Any, Any, Any]] = []
    match case.trainer:
        case "SFT" if "attention_mask" in batch:
            kinds = [(batch["input_ids"], batch["labels"] != -100, batch["attention_mask"])]
        case "DPO":
            names = ("input_ids", "completion_mask", "attention_mask")
            kinds = list(zip(*(batch[name].chunk(2) for name in names), strict=True))
        case "KTO":
            names = ("input_ids", "completion_mask", "attention_mask")
            kinds = [tuple(batch[kind + name] for name in names) for kind in ("", "KL_")]
        case "ORPO":
            for kind in ("chosen", "rejected"):
                mask = batch[f"{kind}_labels"] != -100
                kinds.append((batch[f"{kind}_input_ids"], mask, batch[f"{kind}_attention_mask"]))
    for documents in zip(*(zip(*kind, strict=True) for kind in kinds), strict=True):
        yield [
            [ids[: int(lengths.sum())].tolist(), mask[: int(lengths.sum())].int().tolist()]
            for ids, mask, lengths in documents
        ]


def main() -> None:
    """Write the file."""
    import accelerate
    import transformers
    import trl
    from trl.experimental.orpo import orpo_trainer
    from trl.kernels import chunked_logprob

    for module in (chunked_logprob, orpo_trainer):
        widen(module)
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name))
        figures = {case.name: figures_of(case, folder) for case in CASES}
    versions = {each.__name__: each.__version__ for each in (trl, transformers, accelerate, torch)}
    GOLDEN.write_text(_text({"versions": versions, "figures": figures}))


def _text(value: Any) -> str:
    """JSON with a line for each list of numbers."""
    lines = []
    for name, figures in value["figures"].items():
        fields = [f"    {json.dumps(key)}: {json.dumps(each)}" for key, each in figures.items()]
        lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n  }")
    return (
        f'{{"versions": {json.dumps(value["versions"])},\n"figures": {{\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )


if __name__ == "__main__":
    main()
