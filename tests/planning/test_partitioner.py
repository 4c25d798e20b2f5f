"""What the cache key of a plan is made of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import load_device
from compile_remat.planning.joint_planning import Settings
from compile_remat.planning.partitioner import RematPartitioner, hash_of_sources

ROOT = Path(__file__).resolve().parent.parent.parent
TOPS = ("compile_remat", "passes", "cost_models")


def test_a_changed_byte_in_any_module_changes_the_hash(tmp_path: Path) -> None:
    for top in TOPS:
        shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    folders = [tmp_path / top for top in TOPS]
    before = hash_of_sources(folders)
    assert hash_of_sources([ROOT / top for top in TOPS]) == before
    modules = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".json")]
    assert len(modules) > 100
    for module in modules:
        content = module.read_bytes()
        module.write_bytes(content + b"\n")
        assert hash_of_sources(folders) != before, module
        module.write_bytes(content)
    assert hash_of_sources(folders) == before


def test_the_number_of_threads_is_in_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    partitioner = RematPartitioner(Settings(MemoryBudget("max"), load_device("cpu")), "sources")
    before = partitioner.uuid()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert partitioner.uuid() != before
