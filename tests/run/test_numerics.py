"""Deterministic mode: the settings that it changes and restores."""

from __future__ import annotations

import os

import torch

from weft.run.numerics import ALLOCATOR_SETTINGS, CUBLAS_WORKSPACE, expand_segments, numerics


def test_numerics_are_set_inside_the_block_and_undone(monkeypatch):
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    with numerics(deterministic=True, matmul="tf32"):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"
        assert os.environ[CUBLAS_WORKSPACE] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    assert CUBLAS_WORKSPACE not in os.environ


def test_a_workspace_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":16:8")
    with numerics(deterministic=True, matmul="ieee"):
        assert os.environ[CUBLAS_WORKSPACE] == ":16:8"
    assert os.environ[CUBLAS_WORKSPACE] == ":16:8"


def test_the_default_changes_nothing(monkeypatch):
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    with numerics(deterministic=False, matmul="ieee"):
        assert not torch.are_deterministic_algorithms_enabled()
        assert CUBLAS_WORKSPACE not in os.environ


def test_the_allocator_grows_its_segments_unless_the_environment_says_otherwise(monkeypatch):
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    expand_segments()
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF").startswith("expandable_segments:True,pinned")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    expand_segments()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
