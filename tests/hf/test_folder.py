"""Hugging Face folders as files: each tensor once, any box of any parameter, damage reported by name, bounded memory."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.hf.folders import (
    CONFIGS,
    DEEPSEEK,
    Memory,
    config_of,
    edit,
    pack_experts,
    random_values,
    write,
)
from weft.checkpoint.folder import checkpoint_path
from weft.checkpoint.format import Facts
from weft.checkpoint.read import open_checkpoint
from weft.config.hf.mapping import WeightRule
from weft.config.hf.read_config import hf_mappings
from weft.config.hf.safetensors_files import TensorEntry
from weft.core.axes import Box
from weft.core.model_config import ModelConfig
from weft.errors import CheckpointError
from weft.hf import folder as hf_folder
from weft.hf.folder import HfFolder, slabs
from weft.hf.import_hf import import_params
from weft.hf.match import mapping_of, match_folder
from weft.models import FAMILIES

pytestmark = pytest.mark.usefixtures("fast_disk")

GPT2, LLAMA, TIED, MOE = (CONFIGS[name] for name in ("gpt2", "llama3", "llama3 tied", "qwen3-moe"))


def equal(source: HfFolder | Memory, values: Memory) -> bool:
    return source.shapes == values.shapes and all(
        torch.equal(source.read(name, Box.whole(tensor.shape)), tensor)
        for name, tensor in values.tensors.items()
    )


@pytest.mark.parametrize("max_shard_bytes", [10**9, 5000], ids=["one file", "shards"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_are_read_as_written_bit_by_bit(tmp_path: Path, name: str, max_shard_bytes: int):
    cfg = CONFIGS[name]
    values = random_values(cfg)
    folder = write(tmp_path / "hf", cfg, values, max_shard_bytes=max_shard_bytes)
    assert equal(HfFolder(folder, cfg), values)
    assert {field: getattr(config_of(folder), field) for field in ("layers", "dim")} == {
        "layers": cfg.layers,
        "dim": cfg.dim,
    }
    is_cut = (folder / "model.safetensors.index.json").is_file()
    assert is_cut == (max_shard_bytes == 5000)
    if is_cut:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        sizes = [
            sum(t.nbytes for t in load_file(folder / file).values())
            for file in set(index["weight_map"].values())
        ]
        assert sum(sizes) == index["metadata"]["total_size"]
        assert len(sizes) > 2


@pytest.mark.parametrize("name", ["gpt2", "qwen3-moe", "qwen3-moe, packed", "deepseek"])
def test_any_box_has_the_stored_values(tmp_path_factory: pytest.TempPathFactory, name: str):
    cfg = CONFIGS[name.partition(",")[0]]
    values = random_values(cfg)
    folder = write(tmp_path_factory.mktemp("hf") / "x", cfg, values)
    if "packed" in name:
        pack_experts(folder, 4)
    source = HfFolder(folder, cfg)

    @settings(max_examples=60)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(values.tensors)))
        spans = []
        for n in values.shapes[chosen]:
            spans.append(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))))
        box = Box(lo=tuple(lo for lo, _ in spans), hi=tuple(hi for _, hi in spans))
        found = source.read(chosen, box)
        assert torch.equal(found, values.tensors[chosen][box.slices])
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.nbytes, "memory of its own"

    holds()


def test_published_and_packed_experts_are_the_same_model(tmp_path: Path):
    for name in ("qwen3-moe", "deepseek", "deepseek, second next"):
        cfg = CONFIGS[name]
        values = random_values(cfg)
        folder = write(tmp_path / name, cfg, values)
        pack_experts(folder, 4)
        assert equal(HfFolder(folder, cfg), values), name


def test_every_rule_of_every_family_is_used(tmp_path: Path):
    mappings = hf_mappings(FAMILIES)
    used: dict[str, set[WeightRule]] = {name: set() for name in mappings}
    for name, cfg in CONFIGS.items():
        folders = [write(tmp_path / name, cfg, random_values(cfg))]
        if "experts" in cfg.axis_sizes():
            packed = write(tmp_path / f"{name}-packed", cfg, random_values(cfg))
            pack_experts(packed, 4)
            folders.append(packed)
        for folder in folders:
            used[cfg.family] |= rules_used(folder, cfg)
    for name, mapping in hf_mappings(FAMILIES).items():
        rules = (*mapping.weights.rules, *mapping.weights.packed)
        unused = {rule.param for rule in rules if rule not in used[name]}
        is_always_tied = name == "gpt2"  # there the head is never a tensor of its own
        assert unused == ({"head.proj.weight"} if is_always_tied else set())


def rules_used(folder: Path, cfg: ModelConfig) -> set[WeightRule]:
    """Rules of the family that some parameter of the folder is read by."""
    matched = match_folder(folder, cfg)
    sources = (*matched.params.values(), *matched.aliases.values())
    expanded = {source.rule for source in sources}
    mapping = mapping_of(cfg.family).weights
    indices = mapping.index_sets(cfg)
    used = set()
    for rule in (*mapping.rules, *mapping.packed):
        if expanded & set(rule.expand(indices)):
            used.add(rule)
    return used


def put(
    name: str, value: Callable[[dict[str, Tensor]], Tensor]
) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: value(tensors)})


def test_tensors_without_weights_are_ignored(tmp_path: Path):
    folder = write(tmp_path / "hf", LLAMA, values := random_values(LLAMA))
    edit(folder, put("model.layers.1.self_attn.rotary_emb.inv_freq", lambda t: torch.ones(4)))
    assert equal(HfFolder(folder, LLAMA), values)


def test_the_oldest_files_of_gpt2_are_read(tmp_path: Path):
    """They leave `transformer.` out and hold the causal masks; some of them repeat the embedding as
    the head.
    """
    folder = write(tmp_path / "hf", GPT2, values := random_values(GPT2))

    def as_first_published(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    edit(folder, as_first_published)
    source = HfFolder(folder, GPT2)
    source.check_aliases()
    assert equal(source, values)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_that_is_tied_may_stand_in_the_files_if_it_is_the_embedding(
    tmp_path: Path, is_equal: bool
):
    folder = write(tmp_path / "hf", TIED, random_values(TIED))
    edit(
        folder,
        put("lm_head.weight", lambda t: t["model.embed_tokens.weight"] + (0 if is_equal else 1e-3)),
    )
    source = HfFolder(folder, TIED)
    if is_equal:
        source.check_aliases()
        return
    with pytest.raises(
        CheckpointError,
        match=r"lm_head.weight differs from model.embed_tokens.weight, and the model ties",
    ):
        source.check_aliases()


def test_the_layer_that_predicts_the_second_next_token_is_found_by_its_tensors_and_may_be_left_out(
    tmp_path: Path,
):
    cfg = CONFIGS["deepseek, second next"]
    folder = write(tmp_path / "hf", cfg, values := random_values(cfg))
    names = set(load_file(folder / "model.safetensors"))
    assert {
        f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head", "eh_proj")
    } <= names
    assert config_of(folder).mtp_depth == 1
    HfFolder(folder, cfg).check_aliases()
    without = HfFolder(folder, DEEPSEEK)
    assert equal(
        without, Memory({n: t for n, t in values.tensors.items() if not n.startswith("mtp")})
    )
    edit(
        folder,
        put("model.layers.3.embed_tokens.weight", lambda t: t["model.embed_tokens.weight"] + 1),
    )
    with pytest.raises(
        CheckpointError, match=r"model.layers.3.embed_tokens.weight differs from model.embed_tokens"
    ):
        HfFolder(folder, cfg).check_aliases()


def test_a_header_of_odd_length_is_no_matter(tmp_path: Path):
    values = random_values(LLAMA)
    folder = write(tmp_path / "hf", LLAMA, values)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    content = data[8 + length :]
    longer = (length + 1).to_bytes(8, "little")
    path.write_bytes(longer + header + b" " + content)
    assert equal(HfFolder(folder, LLAMA), values)


@pytest.mark.parametrize("name", ["gpt2", "qwen3-moe"])
def test_parameters_that_no_folder_has_a_place_for_are_not_left_out_in_silence(
    tmp_path: Path, name: str
):
    values = random_values(CONFIGS[name])
    more = Memory({**values.tensors, "layer0.attn.q.lora_a.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"has no place for .got layer0.attn.q.lora_a.weight"):
        write(tmp_path / "hf", CONFIGS[name], more)
    less = Memory(
        {key: tensor for key, tensor in values.tensors.items() if key != "head.norm.weight"}
    )
    with pytest.raises(
        CheckpointError, match=r"holds no tensor of these names .got head.norm.weight"
    ):
        write(tmp_path / "hf", CONFIGS[name], less)


def test_nothing_is_written_over(tmp_path: Path):
    folder = write(tmp_path / "hf", LLAMA, random_values(LLAMA))
    with pytest.raises(CheckpointError, match="exists already"):
        write(folder, LLAMA, random_values(LLAMA))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "and nothing half written stays"


def test_a_disk_error_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuses(tensors: Memory, name: str, box: Box) -> Tensor:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Memory, "read", refuses)
    with pytest.raises(CheckpointError, match="the disk is full"):
        write(tmp_path / "hf", LLAMA, random_values(LLAMA))
    assert not list(tmp_path.iterdir())


class Watched:
    """A Source that counts how many bytes of what it has handed out are still alive."""

    def __init__(self, inner: Memory) -> None:
        self.inner, self.alive, self.most = inner, 0, 0
        self.shapes, self.dtype = inner.shapes, inner.dtype

    def read(self, name: str, box: Box) -> Tensor:
        tensor = self.inner.read(name, box)
        self.alive += tensor.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._gone, tensor.nbytes)
        return tensor

    def _gone(self, size: int) -> None:
        self.alive -= size


def test_tensors_are_written_slab_by_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a model of 140 kB with 18 kB matrices two slabs of 1 kB are in memory, or a chunk where
    chunks are written.
    """
    monkeypatch.setattr(hf_folder, "SLAB_ENTRIES", 256)
    for name in ("llama3", "gpt2", "qwen3-moe"):
        cfg = CONFIGS[name].model_copy(
            update={"ffn": 140} if name != "qwen3-moe" else {"expert_ffn": 70}
        )
        values = random_values(cfg)
        watched = Watched(values)
        folder = write(tmp_path / name, cfg, watched)  # type: ignore[arg-type]
        assert 0 < watched.most <= 2 * 4 * 256
        assert equal(HfFolder(folder, cfg), values)

        again = Watched(values)
        facts = Facts(step=0, seed=1, family=cfg.family, architecture=cfg.model_dump(), plan={})
        run_folder = tmp_path / f"run {name}"
        manifest = import_params(run_folder, again, facts, chunk_bytes=8192)
        assert 0 < again.most <= 8192 + 4 * 256
        assert len(manifest.files) > 4
        stored = open_checkpoint(checkpoint_path(tmp_path / f"run {name}", 0))
        stored.verify()
        assert stored.manifest.sections == ("model",)
        section = stored.section("model")
        for n, t in values.tensors.items():
            assert torch.equal(section.read(n, Box.whole(t.shape)), t)


def test_slabs_make_up_a_tensor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf_folder, "SLAB_ENTRIES", 20)
    for shape in ((), (0,), (0, 7), (64,), (9, 7), (3, 50), (5, 2, 3), (2, 3, 50), (2, 30, 2)):
        count = torch.zeros(shape)
        num_entries = torch.Size(shape).numel()
        entries = torch.arange(num_entries).view(shape)
        parts = []
        for box in slabs(shape):
            assert box.size <= 20
            count[box.slices] += 1
            parts.append(entries[box.slices].flatten())
        assert torch.equal(count, torch.ones(shape))
        in_order = torch.cat(parts)
        assert torch.equal(in_order, entries.flatten()), "as it lies in a file"


def test_a_folder_reads_only_what_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write(tmp_path / "hf", GPT2, random_values(GPT2))
    source = HfFolder(folder, GPT2)
    read = []
    mapped = type(source._files).read

    def watch(self: object, entry: TensorEntry, box: Box) -> Tensor:
        read.append(box)
        return mapped(self, entry, box)

    monkeypatch.setattr(type(source._files), "read", watch)
    source.read("layer1.attn.k.weight", Box((6, 0), (12, 24)))
    assert read == [Box((0, 24 + 6), (24, 24 + 12))], "six columns of the keys' third"
