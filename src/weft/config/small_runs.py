"""Reduced sizes of a run: model, batch and sequence as small as its layout allows, its options as they are. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from weft.config.run import Run, plan_of
from weft.config.schema import DataConfig, ModelSection
from weft.config.validate import config_checks
from weft.errors import UserError
from weft.layout.plan import Plan

SIZES = {
    "layers": 2,
    "head_size": 4,
    "ffn": 16,
    "experts": 4,
    "expert_ffn": 8,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "window": 3,
    "vocab": 256,
}
"""Smallest sizes that are tried, by field."""
MOST_MULTIPLES = 24
HEADS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
DIMS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
SEQ_LENS = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
NUM_MICRO = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
DOCUMENT_SEQ_LEN = 32
"""Shortest sequence with several documents."""
MAX_VOCAB = 1024
"""Larger vocabularies are replaced by that of bytes."""
CLIP = 0.1
"""Below the gradient norm of a tiny model, so that clipping acts."""
STEPS, WARMUP = 6, 2
SMALL_WORLD = 8
STORED_SIZES = {"dim": 128, "layers": 8, "vocab": 4096}
"""A model with stored weights of at most these sizes keeps them, and so its weights are compared."""


AcceptsSizes = Callable[[ModelSection, Plan], bool]
"""Whether a model takes the sizes of its config, in a layout."""


def reduced(run: Run, accepts_sizes: AcceptsSizes) -> Run:
    """The run with reduced sizes; equal layout, options and number types. A model that does not take
    the reduced sizes keeps its own.
    """
    smaller = _reduced(run)
    try:
        plan = plan_of(smaller)
    except UserError:
        return _smaller_schedule(run)
    if not accepts_sizes(smaller.model, plan):
        return _smaller_schedule(run)
    return smaller


def _reduced(run: Run) -> Run:
    run = _smaller_schedule(run)
    if not _keeps_weights(run):
        run = _without_weights(run)
        run = _smaller_model(run)
    run = _smaller_data(run)
    return _smaller_batch(run)


def is_valid(run: Run) -> bool:
    """Whether the checks of the config accept the run."""
    try:
        return not any(check.fails() for check in config_checks(run))
    except (UserError, ValueError):
        return False


def _keeps_weights(run: Run) -> bool:
    """Whether the stored weights that the run starts from are so few that they are compared."""
    if run.model.from_hf is None:
        return False
    sizes = run.model.architecture
    return all(sizes.get(key, 0) <= most for key, most in STORED_SIZES.items())


def _without_weights(run: Run) -> Run:
    return run.with_values({"model.from_hf": None, "lora.base": None, "model.preset": None})


def _smaller_schedule(run: Run) -> Run:
    """A short learning rate schedule with every part of the long one, and clipping that acts."""
    optim = run.optim
    values: dict[str, Any] = {
        "steps": min(run.steps, STEPS),
        "optim.warmup": min(optim.warmup, WARMUP),
        "optim.clip": min(optim.clip, CLIP),
        "eval.every": 0,
        "sample": 0,
        "save.every": 0,
        "resume": None,
    }
    return run.with_values(values)


def _smaller_model(run: Run) -> Run:
    """One field after the other at its smallest valid value."""
    run = _first_valid(run, _head_choices(run))
    for name, smallest in SIZES.items():
        current = run.model.architecture.get(name)
        if type(current) is int and current > smallest:
            run = _first_valid(run, _multiples(name, smallest, current))
    return _first_valid(run, _head_choices(run))


def _multiples(
    name: str,
    smallest: int,
    current: int,
) -> Iterator[dict[str, Any]]:
    for number in range(1, MOST_MULTIPLES):
        value = smallest * number
        if value < current:
            yield {name: value}


def _head_choices(run: Run) -> Iterator[dict[str, Any]]:
    """Numbers of heads and the width, which depend on each other; grouped heads stay grouped."""
    sizes = run.model.architecture
    if "dim" not in sizes:
        return
    largest_dim = sizes["dim"]
    if "heads" not in sizes:
        for dim in DIMS:
            if dim < largest_dim:
                yield {"dim": dim}
        return
    most_heads = sizes["heads"]
    is_grouped = sizes.get("kv_heads", most_heads) < most_heads
    group_size = 2 if is_grouped else 1
    for kv_heads in HEADS:
        num_heads = kv_heads * group_size
        if num_heads > most_heads:
            return
        heads = {"heads": num_heads}
        if "kv_heads" in sizes:
            heads["kv_heads"] = kv_heads
        for dim in DIMS:
            has_changed = dim < largest_dim or num_heads < most_heads
            if dim <= largest_dim and has_changed:
                yield {**heads, "dim": dim}


def _first_valid(run: Run, choices: Iterable[Mapping[str, Any]]) -> Run:
    """The run with the first of these model fields that it accepts; else as it is."""
    for fields in choices:
        values = run.model.model_dump()
        values.update(fields)
        try:
            model = type(run.model).model_validate(values, strict=False)
        except (ValidationError, UserError, ValueError):
            continue
        changed = run.with_values({"model": model})
        if is_valid(changed):
            return changed
    return run


def _packing(data: DataConfig) -> str:
    """The packing of text that computes as the run's data does: records are documents, too."""
    has_documents = data.packing in ("documents", "single") or data.format != "text"
    return "documents" if has_documents else data.packing


def _smaller_data(run: Run) -> Run:
    """Shorter sequences, of the standard data where the vocabulary is now that of bytes."""
    if run.model.kind == "images":
        return run
    packing = _packing(run.data)
    is_standard = run.data.tokenizer == "bytes" and run.data.source == "stdlib"
    vocab = run.model.architecture.get("vocab", 0)
    if not is_standard and vocab == SIZES["vocab"]:
        data = DataConfig(seq_len=run.data.seq_len)
        data = data.model_copy(update={"packing": packing})
        run = run.with_values({"data": data})
    shortest = SEQ_LENS[0]
    if packing == "documents":
        shortest = DOCUMENT_SEQ_LEN
    for seq_len in SEQ_LENS:
        if not shortest <= seq_len < run.data.seq_len:
            continue
        changed = run.with_values({"data.seq_len": seq_len})
        if is_valid(changed):
            return changed
    return run


def _smaller_batch(run: Run) -> Run:
    """Few sequences; more than one micro-batch where the run has more than one."""
    is_small_world = run.device_mesh.size <= SMALL_WORLD
    micro_size = min(run.batch.micro_size, 2 if is_small_world else 1)
    for num_micro in NUM_MICRO:
        num_sequences = micro_size * min(num_micro, run.num_micro)
        sizes = {
            "batch.micro_size": micro_size,
            "batch.global_size": num_sequences * run.num_data_ranks,
        }
        changed = run.with_values(sizes)
        if is_valid(changed):
            return changed
    return run
