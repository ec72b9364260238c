"""Garbage collection by step: after the same steps on every rank, never within one; memory does not grow; restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import weft
from weft.train.step_collection import ALL, NEW, WHOLE, collecting_by_step

TINY = {
    "model.layers": 2, "model.dim": 16, "model.ffn": 32, "model.heads": 2, "model.kv_heads": 2, "data.seq_len": 16,
    "batch.global_size": 2, "batch.micro_size": 1, "transport": "threads", "device": "cpu", "prove.before": "never",
    "save.at_end": False, "report": False, "optim.warmup": 0,
}  # fmt: skip
NUM_STEPS = 150


@contextmanager
def collections() -> Iterator[list[int]]:
    """The generations of the collections that begin while it is open."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def make_garbage() -> None:
    """More objects in cycles than Python leaves without a collection."""
    for _ in range(20_000):
        cycle: list[object] = []
        cycle.append(cycle)


def test_garbage_is_collected_after_steps_alone() -> None:
    with collections() as found, collecting_by_step(4) as collect_after:
        for number in range(1, 12):
            make_garbage()
            collect_after(number)
        assert found == [NEW, NEW]
        collect_after(4 * WHOLE)
        assert found == [NEW, NEW, ALL]
    assert gc.isenabled()


def test_collection_is_restored_and_a_program_that_collects_itself_is_left_alone() -> None:
    with pytest.raises(KeyError), collecting_by_step(1):
        raise KeyError(gc.isenabled())
    assert gc.isenabled()
    gc.disable()
    try:
        with collections() as found, collecting_by_step(1) as collect_after:
            collect_after(1)
        assert not gc.isenabled()
        assert not found
    finally:
        gc.enable()


def test_zero_leaves_collection_to_python() -> None:
    with collections() as found, collecting_by_step(0):
        make_garbage()
    assert found


def test_a_run_collects_every_so_many_steps_and_does_not_grow(tmp_path: Path) -> None:
    objects: list[int] = []
    tensors: list[int] = []
    enabled: set[bool] = set()

    def on_step(step: weft.Step) -> None:
        if step["step"] < NUM_STEPS:  # a rank that has ended restores it
            enabled.add(gc.isenabled())
        if step["step"] % (NUM_STEPS // 3) == 0:
            known = gc.get_objects()
            objects.append(len(known))
            # By type: asked for its class, a deprecated object of torch warns.
            tensors.append(sum(issubclass(type(each), torch.Tensor) for each in known))

    with collections() as found:
        config = {
            **TINY,
            "mesh": "dp2",
            "steps": NUM_STEPS,
            "run.gc_every": 10,
            "out": str(tmp_path),
        }
        weft.train(config, on_step=on_step)
    assert enabled == {False}
    assert gc.isenabled()
    assert found.count(NEW) >= NUM_STEPS // 10
    num_steps = 2 * NUM_STEPS // 3
    assert objects[-1] < objects[0] + 4 * num_steps, "more than a Step, its dict and its list"
    assert tensors[-1] < tensors[0] + num_steps / 2, "some are under way in the prefetching thread"
