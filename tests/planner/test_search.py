"""`weft plan`: legal candidates, the search of the best ones, teaching cases, and what it prints."""

from __future__ import annotations

import json

import pytest

from weft.cli import main
from weft.config.load import load
from weft.config.run import Run
from weft.core.mesh import WIDTH, Mesh
from weft.models import FAMILIES
from weft.planner.candidates import Space, candidates, factorizations, nearest_devices

SMALL = "--model.layers 4 --model.dim 64 --model.ffn 128 --data.seq_len 64 --batch.global_size 8"


def run_of(words: str) -> Run:
    return load(words.split(), FAMILIES)


def test_factorizations_are_all_products() -> None:
    assert factorizations(4, 2) == ((1, 4), (2, 2), (4, 1))


def test_every_candidate_fills_the_devices_and_is_legal() -> None:
    run = run_of(SMALL)
    found = candidates(run, Space(8, 8))
    assert len(found) > 500
    for group in found.groups:
        mesh = Mesh.parse(group.base.mesh)
        assert mesh.size == 8
        assert mesh.degree("pp") <= 4
        assert 8 % (mesh.degree("dp") * group.base.micro_size) == 0
    assert any("ep shards experts" in reason for reason in found.illegal)


def test_a_large_model_has_thousands_of_candidates() -> None:
    run = run_of("--model.preset llama3-70b --data.seq_len 8192 --batch.global_size 512")
    assert len(candidates(run, Space(256, 8))) > 2_000


def test_the_tensor_axis_is_innermost() -> None:
    found = candidates(run_of(SMALL), Space(8, 4))
    for group in found.groups:
        assert "tp" not in group.base.mesh.split(" ")[:-1]


def test_devices_that_no_layout_fills_have_neighbours_that_one_fills() -> None:
    run = run_of(SMALL)
    assert not candidates(run, Space(7, 8)).groups
    assert nearest_devices(run, Space(7, 8)) == (6, 8) or nearest_devices(run, Space(7, 8)) == (
        4,
        8,
    )


@pytest.mark.slow
def test_the_text_fits_80_columns_and_ends_with_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", *SMALL.split(), "--devices", "2", "--hardware", "h100", "--measured", "2"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("weft train")
    assert max(map(len, lines[:-1])) <= WIDTH


@pytest.mark.slow
def test_json_has_the_best_and_the_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *SMALL.split(), "--devices", "2", "--hardware", "h100", "--measured", "2"]
    assert main([*words, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["best"]
    counted = sum(fields["rejected"].values()) + len(fields["best"])
    assert counted <= fields["candidates"]
