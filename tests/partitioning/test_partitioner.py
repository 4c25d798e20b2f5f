"""The parts of a plan's cache key."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from pathlib import Path

import pytest
import torch

from compile_remat._util.user_pass import UserPass
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import OpKind, Times, load_device
from compile_remat.partitioning.partitioner import RematPartitioner, hash_of_sources, identity_text
from compile_remat.passes import Assumptions, Link, Planner
from compile_remat.planning import plain_peaks
from compile_remat.planning.request import ChosenPlan, Fit, FitBelow, Replay, Request, Resume, SharedOption
from compile_remat.planning.searches import Searches
from compile_remat.planning.settings import Settings
from tests.oracles.random_problems import seeded_problem

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
    partitioner = RematPartitioner(Settings(MemoryBudget("max"), load_device("cpu")))
    before = partitioner.uuid()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert partitioner.uuid() != before


def test_under_install_the_key_has_what_a_fraction_is_of() -> None:
    settings = Settings(MemoryBudget("fraction", 0.5), load_device("cpu"))
    before = [RematPartitioner(settings, is_installed=installed).uuid() for installed in (False, True)]
    plain_peaks.note_plain_bytes("cpu", 1 << 20)
    after = [RematPartitioner(settings, is_installed=installed).uuid() for installed in (False, True)]
    assert before[0] == after[0] and before[1] != after[1]


EXAMPLES: dict[str, object] = {
    "settings": Settings(MemoryBudget("min"), load_device("cpu")),
    "request": FitBelow(1 << 20),
    "assumed": Assumptions(stored=(("mul", True),), backward_bytes=(("add", 4),)),
    "sources_hash": "other sources",
    "plans_hash": "other plans",
    "fallback": "the planner broke",
    "sizes": (("s77", 64),),
    "guarded": True,
    "early": (0, 2),
    "is_installed": True,
}
"""Another value for each field of the partitioner."""

OTHER_SETTINGS: dict[str, object] = {
    "is_here": False,
    "slices": 8,
    "inputs_are_constant": True,
    "expandable": True,
    "budget": MemoryBudget("bytes", 1 << 20),
    "device": load_device("h200"),
    "cost_model": "unit",
    "from_auto": True,
    "plan_dir": "/plans",
    "tf32": (OpKind.MATMUL,),
    "is_given": False,
    "torch_ratio": 0.5,
    "times": Times.of({"mm": 1}),
    "time_limit": 3.0,
    "plain_bytes": 1 << 20,
    "link": Link(1, 2, 3),
    "moves_nothing": True,
    "joint_passes": (UserPass(print, "print", "an identity"),),
}
"""The same for the settings."""

REQUESTS: list[Request] = [
    Fit(),
    FitBelow(1 << 20),
    FitBelow(1 << 21),
    *(SharedOption(**{each.name: 1}) for each in fields(SharedOption)),
    Replay(()),
    Replay(("a",)),
    Replay(("a",), ("b",)),
]


def test_every_field_is_in_the_cache_key() -> None:
    plain = RematPartitioner(Settings(MemoryBudget("max"), load_device("cpu"), tf32=()))
    changed = [replace(plain, **{each.name: EXAMPLES[each.name]}) for each in fields(RematPartitioner) if each.compare]
    for each in fields(Settings):
        changed.append(replace(plain, settings=replace(plain.settings, **{each.name: OTHER_SETTINGS[each.name]})))
    keys = {partitioner.uuid() for partitioner in [plain, *changed]}
    assert len(keys) == 1 + len(EXAMPLES) + len(OTHER_SETTINGS)


def test_what_was_searched_is_not_in_the_key() -> None:
    partitioner = RematPartitioner(Settings(MemoryBudget("max"), load_device("cpu")))
    other = replace(partitioner, searches=Searches())
    assert other == partitioner and other.uuid() == partitioner.uuid()
    assert [each.name for each in fields(RematPartitioner) if not each.compare] == ["searches"]


def test_every_request_has_a_key_of_its_own() -> None:
    plain = RematPartitioner(Settings(MemoryBudget("max"), load_device("cpu")))
    plan = Planner(seeded_problem(3)).fastest()
    requests = [*REQUESTS, *(Resume(FitBelow(1), key, ChosenPlan(plan, floor)) for key in "ab" for floor in (1, 2))]
    partitioners = [replace(plain, request=request) for request in requests]
    assert len({partitioner.uuid() for partitioner in partitioners}) == len(requests)
    for partitioner in partitioners:
        twin = pickle.loads(pickle.dumps(partitioner))
        assert twin == partitioner and twin.uuid() == partitioner.uuid()


def test_a_field_that_repr_does_not_show_is_in_the_key() -> None:
    @dataclass(frozen=True)
    class Hidden:
        shown: int
        hidden: int = field(repr=False)

    assert repr(Hidden(1, 2)) == repr(Hidden(1, 3)) and identity_text(Hidden(1, 2)) != identity_text(Hidden(1, 3))
    with pytest.raises(TypeError, match="dict cannot be part of a cache key"):
        identity_text((1, {}))


def test_the_partitioner_is_constant() -> None:
    partitioner = RematPartitioner(Settings(MemoryBudget("max"), load_device("cpu")))
    with pytest.raises(FrozenInstanceError):
        partitioner.request = FitBelow(1)  # type: ignore[misc]
