"""`weft.train(data=...)`: datasets and DataLoaders of torch, of the library datasets, lists and iterables, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import WeightedRandomSampler as Weighted

import weft
from weft.data.dataset import open_data
from weft.python_api import checked_run
from weft.start.checked_run import load_checked_run
from weft.start.given_values import GivenRun

TEXTS = [f"text {number} of forty, which are all different " * 3 for number in range(40)]
MODEL = {"name": "llama3", "dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 16}
KEYS: dict[str, Any] = {
    "model": MODEL,
    "steps": 2,
    "batch.global_size": 4,
    "data.seq_len": 32,
    "prove.before": "never",
    "precision.params": "float64",
    "precision.compute": "float64",
    "precision.reduce": "float64",
}


class Map(Dataset[Any]):
    """A map-style dataset, which raises IndexError as lists do."""

    def __init__(self, item: Callable[[int], Any], length: int = 40, says: int = 40) -> None:
        self.item, self.length, self.says = item, length, says

    def __len__(self) -> int:
        return self.says

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        return self.item(index)


class Stream(IterableDataset[Any]):
    """An iterable dataset without an end, which counts what is read of it."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item, self.num_read = item, 0

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            self.num_read += 1
            yield self.item(number)
            number += 1


def ids(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(number))


def all_inputs(data: Any, **keys: Any) -> list[list[int]]:
    """Inputs of the first 10 samples in the order of the run."""
    given = GivenRun.of({**KEYS, **keys}, None, data)
    run = load_checked_run(given.words, values=given.all_values)
    samples = open_data(run.data, run.model)
    places = samples.at(np.arange(min(10, samples.num_samples)), seed=1)
    found: list[list[int]] = samples.read(places).inputs.tolist()
    return found


def test_all_kinds_of_texts_are_the_same_data(tmp_path: Path) -> None:
    import datasets  # type: ignore[import-untyped]  # a second

    file = tmp_path / "texts.jsonl"
    datasets.disable_progress_bars()
    rows = [{"text": text} for text in TEXTS]
    in_memory = datasets.Dataset.from_list(rows)
    in_memory.to_json(file)
    expected = all_inputs(str(file), **{"data.source": str(file)})
    in_order = all_inputs(str(file), **{"data.source": str(file), "data.order": "stored"})
    texts = Map(TEXTS.__getitem__)
    for data in (TEXTS, rows, in_memory, texts, DataLoader(texts, 3, shuffle=True)):
        assert all_inputs(data) == expected
    for data in (iter(TEXTS), in_memory.to_iterable_dataset(), DataLoader(texts, 3)):
        assert all_inputs(data) == in_order
    assert all_inputs(DataLoader(texts, 3, num_workers=2)) == in_order
    assert in_order[0] == list(TEXTS[0][:32].encode())
    assert in_order != expected


def test_rows_of_tokens_train_on_labels_and_leave_out_padding() -> None:
    def padded(number: int) -> dict[str, Any]:
        labels = ids(number).clone()
        labels[:5] = -100
        mask = torch.ones(32, dtype=torch.int64)
        mask[30:] = 0
        return {"input_ids": ids(number), "labels": labels, "attention_mask": mask}

    given = GivenRun.of({**KEYS, "data.packing": "single"}, None, Map(padded))
    run = load_checked_run(given.words, values=given.all_values)
    arrays = open_data(run.data, run.model).read(np.array([7]))
    row = ids(7).numpy()
    assert arrays.inputs[0, :30].tolist() == row[:30].tolist()
    assert arrays.targets[0].tolist() == [-100] * 4 + row[5:30].tolist() + [-100] * 3


def test_pairs_of_inputs_and_next_tokens_are_rows_with_one_token_more() -> None:
    def pair(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = ids(number)
        targets = row[1:].clone()
        targets[:3] = -1
        return row[:-1], targets

    given = GivenRun.of({**KEYS, "data.packing": "single"}, None, DataLoader(Map(pair), 5))
    run = load_checked_run(given.words, values=given.all_values)
    arrays = open_data(run.data, run.model).read(np.array([0]))
    row = ids(0).numpy()
    assert arrays.inputs[0].tolist() == row.tolist()
    assert arrays.targets[0].tolist() == [-100] * 3 + row[4:].tolist() + [-100]


def test_a_sampler_of_ones_own_keeps_its_order_and_draws_from_the_seed_of_the_run() -> None:
    rows = Map(ids)
    loader = DataLoader(rows, 4, sampler=Weighted([1.0] * 5 + [0.0] * 35, 12))
    found = all_inputs(loader)
    assert found == all_inputs(loader)
    assert found != all_inputs(loader, seed=2)
    assert all(row in [ids(number).tolist() for number in range(5)] for row in found)


def test_the_shard_of_a_distributed_sampler_is_the_whole_dataset() -> None:
    rows = Map(ids)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, num_replicas=2, rank=1)
    assert all_inputs(DataLoader(rows, 4, sampler=sampler)) == all_inputs(rows)


def test_what_a_collate_function_makes_is_split_into_items() -> None:
    def collate(items: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.stack(items)}

    assert all_inputs(DataLoader(Map(ids), 7, collate_fn=collate)) == all_inputs(
        Map(ids), **{"data.order": "stored"}
    )


def test_an_order_that_the_config_names_wins() -> None:
    assert all_inputs(iter(TEXTS), **{"data.order": "shuffled"}) == all_inputs(TEXTS)


def test_of_an_endless_stream_no_more_is_read_than_the_steps_need() -> None:
    stream = Stream(lambda number: {"input_ids": ids(number)})
    found = all_inputs(stream)
    assert found[:2] == [ids(0).tolist(), ids(1).tolist()]
    assert stream.num_read == 9  # 8 samples of 32 tokens, and the token after them


def test_for_epochs_a_stream_is_read_to_its_end() -> None:
    """Not as far as the default number of steps, 200 of 4 samples, would need."""
    rows = [{"input_ids": ids(number)} for number in range(1000)]
    keys = {key: value for key, value in KEYS.items() if key != "steps"}
    given = GivenRun.of({**keys, "epochs": 2}, None, iter(rows))
    run = load_checked_run(given.words, values=given.all_values)
    assert open_data(run.data, run.model).num_samples == len(rows)
    assert run.steps == 2 * len(rows) // 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Map(TEXTS.__getitem__, length=30), r"Map ends after 30 items.*got 40; need 30.*__len__"),
        ([], r"list is empty"),
        (iter(()), r"tuple_iterator is empty"),
        ([None], r"is no data \(got list of NoneType"),
        ([1.5, "text"], r"is no data \(got list of float"),
        (["text", {"text": 5}], r"list\[1\]: the field 'text' is not text"),
        (Map(lambda number: {"input_ids": ids(number) + 1}), r"outside the model's vocabulary"),
        (Map(lambda n: {"input_ids": ids(n), "labels": ids(n + 1)}), r"Map\[0\]: the label at"),
        (Map(lambda number: (ids(number), ids(number))), r"targets are not the next tokens"),
        (Map(lambda n: {"input_ids": ids(n), "attention_mask": ids(n) % 2}), r"in the middle"),
        (DataLoader(Map(ids), 2, collate_fn=lambda rows: (rows, 3)), r"different lengths"),
    ],
)
def test_what_is_no_data_is_one_line(data: Any, message: str) -> None:
    with pytest.raises(weft.WeftError, match=message) as raised:
        checked_run(KEYS, data=data)
    assert len(str(raised.value).splitlines()) == 1


class Input(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


class Regression(nn.Module):
    def forward(self, x: torch.Tensor, batch: weft.Batch) -> torch.Tensor:
        assert batch.fields is not None
        return (x.squeeze(1) - batch.fields["y"].to(x.dtype)).square().sum()


@dataclass(frozen=True)
class Width:
    dim: int = 4


REGRESSION = weft.Model(
    Config=Width,
    blocks=lambda c: {
        "layer0": Input(3, c.dim),
        "layer1": nn.Linear(c.dim, 1),
        "loss": Regression(),
    },
    AXES={"*.weight": (None, None), "*.bias": (None,)},
    INPUTS={"x": weft.InputSpec((3,)), "y": weft.InputSpec()},
    name="regression_of_items",
)


def sample(number: int) -> tuple[torch.Tensor, np.float32]:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(3, generator=generator), np.float32(number % 5)


def losses(data: Any, out: Path, **keys: Any) -> list[float]:
    own = {key: value for key, value in KEYS.items() if key not in ("model", "data.seq_len")}
    config = {**own, "transport": "threads", "out": out, **keys}
    return [step["loss"] for step in weft.train(config, model=REGRESSION, data=data).history]


def test_an_endless_stream_trains_the_same_on_any_layout_and_resumes(tmp_path: Path) -> None:
    """Resumed with a stream of other items, the run continues with those that it has read."""
    micro = {"batch.micro_size": 1, "steps": 6}
    whole = losses(Stream(sample), tmp_path / "whole", **micro)
    expected = losses(
        {
            "x": torch.stack([sample(number)[0] for number in range(24)]),
            "y": np.array([sample(number)[1] for number in range(24)]),
        },
        tmp_path / "arrays",
        **{**micro, "data.order": "stored"},
    )
    assert whole == expected
    on_ranks = losses(Stream(sample), tmp_path / "ranks", mesh="dp2", **micro)
    assert on_ranks == pytest.approx(whole, rel=1e-12)

    def stop(step: weft.Step) -> None:
        raise RuntimeError

    own = {**{key: KEYS[key] for key in KEYS if key not in ("model", "data.seq_len")}, **micro}
    with pytest.raises(RuntimeError):
        weft.train(
            {**own, "out": tmp_path / "part"}, model=REGRESSION, data=Stream(sample), on_step=stop
        )
    other = Stream(lambda number: sample(number + 99))
    resumed = losses(other, tmp_path / "part", resume="auto", mesh="dp2", **micro)
    assert resumed[-1] == pytest.approx(whole[-1], rel=1e-12)
    assert not other.num_read
    with pytest.raises(weft.WeftError, match="steps: the run has read of Stream"):
        losses(other, tmp_path / "part", **{**micro, "resume": "auto", "steps": 8})


def test_a_dataset_that_has_changed_is_rejected_at_a_resume(tmp_path: Path) -> None:
    losses(Map(sample), tmp_path / "run")
    with pytest.raises(weft.WeftError, match="other data than the checkpoint was trained on"):
        losses(Map(lambda n: sample(n + 1)), tmp_path / "run", resume="auto", steps=3)


def test_a_proof_reads_a_dataset() -> None:
    report = weft.prove({"mesh": "dp2"}, model=REGRESSION, data=Map(sample), first=2)
    assert report.holds
    assert weft.prove({**KEYS, "mesh": "tp2"}, data=Map(TEXTS.__getitem__), first=1).holds


def test_images_with_their_classes_are_those_of_files() -> None:
    images = [np.full((1, 28, 28), number, np.uint8) for number in range(12)]
    pairs = Map(lambda number: (images[number], number % 10), length=12, says=12)
    keys = {key: value for key, value in KEYS.items() if key not in ("model", "data.seq_len")}
    given = GivenRun.of({**keys, "model.name": "mnist"}, None, pairs)
    run = load_checked_run(given.words, values=given.all_values)
    arrays = open_data(run.data, run.model).read(np.arange(12))
    assert arrays.inputs.tolist() == np.stack(images).tolist()
    assert arrays.targets.tolist() == [number % 10 for number in range(12)]
    floats = Map(lambda number: (images[number] / 255.0, 1))
    with pytest.raises(weft.WeftError, match="item 0 of the Map is no image with its class"):
        checked_run({**keys, "model.name": "mnist"}, data=floats)
