"""Reduced sizes of a run: model, batch and sequence as small as its layout allows, its options as they are. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from weft.config.hf.architectures import is_architecture_name
from weft.config.rules.config_checks import config_checks
from weft.config.rules.layout import layout_request
from weft.config.run import Run, has_chunked_losses, plan_of
from weft.config.schema import DataConfig, ModelSection
from weft.config.small_layers import model_with, with_fewer_layers
from weft.core.dimension import activation_axes, dimensions, position_axes
from weft.errors import UserError
from weft.layout.plan import Plan, sharding_rule_of

SIZES = {
    "head_size": 4,
    "ffn": 24,
    "top_k": 2,
    "topk_group": 1,
    "n_group": 2,
    "experts": 8,
    "expert_ffn": 8,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "window": 3,
}
"""Smallest sizes that are tried, by field. A token visits few of the experts, else nothing would be
balanced, and no expert could have more than twice the mean; the feed-forward part is wider than the
residual stream, so that the bounds of ZeRO's shards cut matrices."""
VOCAB = 256
"""Smallest vocabulary of weft's own models."""
MOST_MULTIPLES = 24
HEADS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
DIMS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
QUANTIZED_BLOCKS = {"nf4": 64, "nf4_double": 64 * 256}
"""Entries of a row that no layout may cut."""
LEAST_QUANTIZED_DIM = 96
"""Width of a model whose linears are held in 4 bits: a line has more than one block of 64."""
SEQ_LENS = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096)
NUM_MICRO = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
DOCUMENT_SEQ_LEN = 32
"""Shortest sequence with several documents."""
CLIP = 0.1
"""Below the gradient norm of a tiny model, so that clipping acts."""
STATE_BLOCK = 6
"""Entries of a block of states in 8 bits: rows have several, which the bounds of shards cut."""
BALANCE_LOSS = 0.05
"""Smallest weight of a balance loss, whose effect is above the bounds of a float32 proof."""
STEPS, WARMUP = 6, 2
SMALL_WORLD = 8
STORED_SIZES = {"dim": 128, "layers": 8, "vocab": 4096}
"""A model with stored weights of at most these sizes keeps them, and so its weights are compared."""
USER_MICRO = 1
MOST_LOGITS = 2**22
"""Tokens of a step times the vocabulary, up to which a user's model keeps the length of the run."""
MOST_VOCAB_ROWS = 2**18
"""Vocabulary times ranks, up to which a user's model keeps its vocabulary."""
ROPE_CONTEXT = "rope_scaling_original_context"

SHARED = {axis for each in dimensions().values() for axis in each.whole_if_uneven}
"""Logical axes of heads that several ranks may share."""

AcceptsSizes = Callable[[ModelSection, Plan], bool]
"""Whether a model takes the sizes of its config, in a layout."""


def reduced(run: Run, accepts_sizes: AcceptsSizes) -> Run:
    """The run with reduced sizes; equal layout, options and number types. A model that does not take
    the reduced sizes keeps its own.
    """
    if has_chunked_losses(run):  # of small sizes, too
        run = run.with_values({"parallel.logits": "chunked"})
    run = _smaller_schedule(run)
    if _keeps_weights(run):
        return _smaller_batch(_smaller_data(run))
    unsized = _without_weights(run)
    smaller = _smaller_batch(_smaller_data(_smaller_model(unsized)))
    try:
        plan = plan_of(smaller)
    except UserError:
        return run
    return smaller if accepts_sizes(smaller.model, plan) else run


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
        "optim.state_block": min(optim.state_block, STATE_BLOCK),
        "eval.every": 0,
        "sample": 0,
        "sample_every": 0,
        "log.blocks": 0,
        "save.every": 0,
        "resume": None,
        "resume_code": "same",
        "compile": "off",
    }
    return run.with_values(values)


def _smaller_model(run: Run) -> Run:
    """Fewer layers, then one field after the other at its smallest valid value."""
    run = with_fewer_layers(run, is_valid)
    own_heads = run
    run = _with_fewer_heads(run, own_heads)
    for name, smallest in SIZES.items():
        current = run.model.architecture.get(name)
        if type(current) is int and current > smallest:
            run = _first_valid(run, _multiples(name, smallest, current))
    run = _with_fewer_heads(run, own_heads)
    run = _first_valid(run, _vocabularies(run))
    return _first_valid(run, _balanced(run))


def _vocabularies(run: Run) -> Iterator[dict[str, Any]]:
    """The smallest vocabulary with the remainder of the run's, whatever number of ranks shards it;
    that of a user's model stays where it is cheap. The padding token is taken modulo it, as the ids
    of the data are.
    """
    current = run.model.architecture.get("vocab", 0)
    is_kept = run.model.is_opaque and current * run.device_mesh.size <= MOST_VOCAB_ROWS
    if current > VOCAB and not is_kept:
        remainder = (current - VOCAB) % run.device_mesh.size
        vocab = VOCAB + remainder
        if vocab < current:
            padding_id = run.model.architecture.get("padding_id")
            padding = {} if padding_id is None else {"padding_id": padding_id % current % vocab}
            yield {"vocab": vocab, **padding}


def _balanced(run: Run) -> Iterator[dict[str, Any]]:
    """A balance loss that counts, where there is one."""
    weight = run.model.architecture.get("balance_loss", 0.0)
    if 0 < weight < BALANCE_LOSS:
        yield {"balance_loss": BALANCE_LOSS}


def _multiples(name: str, smallest: int, current: int) -> Iterator[dict[str, Any]]:
    for number in range(1, MOST_MULTIPLES):
        value = smallest * number
        if value < current:
            yield {name: value}


def _with_fewer_heads(run: Run, own: Run) -> Run:
    """The run with twice the fewest heads that its layout allows, or with the fewest: where a rank
    has one head (or one of keys, which all its queries share), the order of heads does not matter.

    Args:
        own: the run with its own heads.
    """
    run = _first_valid(run, _head_choices(run))
    sizes = run.model.architecture
    fewest = sizes.get("kv_heads", sizes.get("heads", 0))
    return _first_valid(run, _head_choices(own, at_least=2 * fewest))


def _head_choices(run: Run, *, at_least: int = 1) -> Iterator[dict[str, Any]]:
    """Numbers of heads and the width, which depend on each other; grouped heads stay grouped.

    Args:
        at_least: heads, or heads of keys where they are grouped.
    """
    sizes = run.model.architecture
    if "dim" not in sizes:
        return
    largest_dim = sizes["dim"]
    least_dim = 0 if run.lora.quantize == "none" else LEAST_QUANTIZED_DIM
    dims = [dim for dim in DIMS if least_dim <= dim <= largest_dim]
    if "heads" not in sizes:
        for dim in dims:
            if dim < largest_dim and at_least <= 1:
                yield {"dim": dim}
        return
    most_heads = sizes["heads"]
    most_kv_heads = sizes.get("kv_heads", most_heads)
    is_grouped = most_kv_heads < most_heads
    group_size = 2 if is_grouped else 1
    for kv_heads in HEADS:
        if kv_heads < at_least:
            continue
        num_heads = kv_heads * group_size
        if num_heads > most_heads or kv_heads > most_kv_heads:
            return
        heads = {"heads": num_heads}
        if "kv_heads" in sizes:
            heads["kv_heads"] = kv_heads
        for dim in dims:
            if dim < largest_dim or num_heads < most_heads:
                yield {**heads, "dim": dim}


def _first_valid(run: Run, choices: Iterable[Mapping[str, Any]]) -> Run:
    """The run with the first of these model fields that it accepts; else as it is."""
    for fields in choices:
        model = model_with(run.model, fields)
        if model is None:
            continue
        changed = run.with_values({"model": model})
        if is_valid(changed) and _shards_alike(changed, run) and _has_whole_blocks(changed):
            return changed
    return run


def _shards_alike(run: Run, own: Run) -> bool:
    """Whether heads of keys and values are sharded as in the other run: by tp, and by cp under
    Ulysses, which repeat them on ranks that share them.
    """

    def whole_parts(each: Run) -> tuple[object, ...]:
        mesh = each.device_mesh
        local_sizes = layout_request(mesh, each.model, each.parallel).local_sizes
        degree = mesh.degree(position_axes()) if each.parallel.context == "ulysses" else 1
        uneven = {axis for axis, size in local_sizes.items() if size % degree}
        return sharding_rule_of(mesh, each.model.axis_sizes()), uneven & SHARED

    return whole_parts(run) == whole_parts(own)


def _has_whole_blocks(run: Run) -> bool:
    """Whether tensor parallelism cuts no block of a row in 4 bits, whichever linears it shards by their
    inputs; weft's own families have none in its way.
    """
    degree = run.device_mesh.degree(activation_axes())
    if run.lora.quantize == "none" or degree == 1 or not is_architecture_name(run.model.name):
        return True
    parts = [features / degree for _, features in run.model.linears().values()]
    return all(part % QUANTIZED_BLOCKS[run.lora.quantize] == 0 for part in parts)


def has_documents(data: DataConfig) -> bool:
    """Whether sequences hold documents or records, which attention does not cross."""
    return data.packing in ("documents", "single") or data.format != "text"


def _smaller_data(run: Run) -> Run:
    """Shorter sequences; those of a user's model stay as long as they are, where that is cheap.

    Scaling of rotary embeddings begins at a context that is shorter by as much.
    """
    if run.model.kind != "tokens":
        return run
    shortest = DOCUMENT_SEQ_LEN if has_documents(run.data) else SEQ_LENS[0]
    for seq_len in _lengths(run):
        if not shortest <= seq_len < run.data.seq_len:
            continue
        changed = _with_context(run.with_values({"data.seq_len": seq_len}), run.data.seq_len)
        if is_valid(changed):
            return changed
    return run


def _lengths(run: Run) -> Iterator[int]:
    """Lengths of sequences in the order in which they are tried."""
    if not run.model.is_opaque:
        yield from SEQ_LENS
        return
    vocab = run.model.axis_sizes().get("vocab", VOCAB)
    num_sequences = min(run.num_micro, NUM_MICRO[0]) * run.num_data_ranks
    longest = MOST_LOGITS // (vocab * num_sequences)
    if run.data.seq_len > longest:
        yield from (seq_len for seq_len in reversed(SEQ_LENS) if seq_len <= longest)
        yield from SEQ_LENS


def _with_context(run: Run, seq_len: int) -> Run:
    """With the context before the scaling of rotary embeddings in proportion to shorter sequences.

    Args:
        seq_len: of the run as configured.
    """
    sizes = run.model.architecture
    if sizes.get("rope_scaling_factor", 1.0) == 1.0:
        return run
    shorter = max(sizes[ROPE_CONTEXT] * run.data.seq_len // seq_len, run.data.seq_len)
    model = model_with(run.model, {ROPE_CONTEXT: min(shorter, sizes[ROPE_CONTEXT])})
    return run if model is None else run.with_values({"model": model})


def _smaller_batch(run: Run) -> Run:
    """Few sequences; more than one micro-batch where the run has more than one."""
    is_small_world = run.device_mesh.size <= SMALL_WORLD
    most = USER_MICRO if run.model.is_opaque or not is_small_world else 2
    micro_size = min(run.batch.micro_size, most)
    for num_micro in NUM_MICRO:
        num_sequences = micro_size * min(num_micro, run.num_micro)
        sizes = {
            "batch.micro_size": micro_size,
            "batch.statistics_size": run.batch.statistics_of(micro_size),
            "batch.global_size": num_sequences * run.num_data_ranks,
        }
        changed = run.with_values(sizes)
        if is_valid(changed):
            return changed
    return run
