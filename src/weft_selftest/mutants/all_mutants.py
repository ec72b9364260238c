"""All mutants, in the order of the dimensions that they concern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from weft_selftest.mutants import (
    attention_faults,
    bias_faults,
    block_faults,
    buffer_faults,
    composition_faults,
    context_faults,
    data_faults,
    dropout_faults,
    expert_faults,
    fp8_faults,
    gather_faults,
    gradient_faults,
    head_faults,
    norm_faults,
    optimizer_faults,
    order_faults,
    pipeline_faults,
    quantized_faults,
    rate_faults,
    resume_faults,
    router_faults,
    sample_faults,
    shard_faults,
    stage_faults,
    tensor_faults,
    update_faults,
)
from weft_selftest.mutants.fault import Mutant

LISTS: tuple[Sequence[Mutant], ...] = (
    gradient_faults.MUTANTS,
    norm_faults.MUTANTS,
    gather_faults.MUTANTS,
    tensor_faults.MUTANTS,
    head_faults.MUTANTS,
    composition_faults.MUTANTS,
    pipeline_faults.MUTANTS,
    context_faults.MUTANTS,
    expert_faults.MUTANTS,
    update_faults.MUTANTS,
    fp8_faults.MUTANTS,
    optimizer_faults.MUTANTS,
    order_faults.MUTANTS,
    data_faults.MUTANTS,
    resume_faults.MUTANTS,
    attention_faults.MUTANTS,
    bias_faults.MUTANTS,
    block_faults.MUTANTS,
    stage_faults.MUTANTS,
    router_faults.MUTANTS,
    shard_faults.MUTANTS,
    quantized_faults.MUTANTS,
    rate_faults.MUTANTS,
    sample_faults.MUTANTS,
    dropout_faults.MUTANTS,
    buffer_faults.MUTANTS,
)


def all_mutants() -> Mapping[str, Mutant]:
    """Every mutant by name."""
    found: dict[str, Mutant] = {}
    for mutants in LISTS:
        for mutant in mutants:
            assert mutant.name not in found, f"two mutants are called {mutant.name}"
            found[mutant.name] = mutant
    return MappingProxyType(found)
