"""The partitioner that Inductor calls: an immutable value made of all that a plan depends on, which is also its cache key."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

import compile_remat
from compile_remat import cost_models, passes
from compile_remat._torch import cache_key_text
from compile_remat.errors import PlanMismatchError
from compile_remat.inductor.entry import CustomPartitionerFn
from compile_remat.passes import keep_matmuls_in_place
from compile_remat.planning.joint_planning import Settings, split, split_without_planner


class RematPartitioner(CustomPartitionerFn):
    """The value that Inductor calls, pickles and hashes: its fields are all that a plan depends on.

    Attributes:
        fallback: Why the planner failed; with a reason here the planner is left alone.
        sizes: The symbols among a graph's inputs and the sizes that they stood for.  A plan is made for these, and torch's key
            has the symbols alone: without them a plan for a small batch would come out of the cache for a large one.
        guarded: Whether Inductor's fusions are kept to the plan, which torch's key does not see.
    """

    def __init__(
        self,
        settings: Settings,
        sources_hash: str,
        fallback: str = "",
        *,
        sizes: tuple[tuple[str, int], ...] = (),
        guarded: bool = False,
    ) -> None:
        self.settings = settings
        self.sources_hash = sources_hash
        self.plans_hash = _plans_hash(settings.plan_dir)
        self.fallback = fallback
        self.sizes = sizes
        self.guarded = guarded

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph (Inductor passes ``num_fwd_outputs``, ``static_lifetime_input_indices``, ``compiler``)."""
        keywords: dict[str, Any] = {
            "num_fwd_outputs": kwargs["num_fwd_outputs"],
            "static_lifetime_input_indices": kwargs.get("static_lifetime_input_indices"),
        }
        if self.fallback:
            return split_without_planner(gm, joint_inputs, self.settings, self.fallback, **keywords)
        by_inductor = kwargs.get("compiler") == "inductor"
        is_cached = by_inductor and cache_key_text.partition_is_stored()
        forward, backward = split(gm, joint_inputs, self.settings, is_cached=is_cached, **keywords)
        if self.guarded and by_inductor:
            keep_matmuls_in_place(backward)
        return forward, backward

    def tightened(self, planning_bytes: int, *, guarded: bool | None = None) -> RematPartitioner:
        """One that plans for fewer bytes than the budget."""
        other = self.under(replace(self.settings, tightened_bytes=planning_bytes, share=None, stopped=None))
        other.guarded = self.guarded if guarded is None else guarded
        return other

    def under(self, settings: Settings) -> RematPartitioner:
        """One with other settings."""
        other = copy.copy(self)
        other.settings = settings
        return other

    def uuid(self) -> object:
        """Changes with our sources, the settings, the device's figures, the pinned plans and the number of threads.

        The bytes that a CPU's convolutions and attention take for themselves depend on the threads; torch's own key has their
        number only from 2.13 on, and only where Inductor's `cpp.threads` is not set.
        """
        threads = torch.get_num_threads()
        return (
            self.sources_hash,
            repr(self.settings),
            self.plans_hash,
            self.fallback,
            self.sizes,
            self.guarded,
            threads,
        )


@functools.cache
def sources_hash() -> str:
    """Hash of all our source files and tables: another version of us makes another cache key."""
    return hash_of_sources(Path(module.__file__ or "").parent for module in (compile_remat, passes, cost_models))


def hash_of_sources(folders: Iterable[Path]) -> str:
    """Hash of the names and contents of all Python and JSON files in the folders and below."""
    digest = hashlib.sha256()
    for folder in folders:
        files = sorted(f for f in folder.resolve().rglob("*") if f.suffix in (".py", ".json"))
        for file in files:
            digest.update(str(file.relative_to(folder.resolve())).encode() + b"\0")
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _plans_hash(plan_dir: str | None) -> str:
    """Hash of the pinned plans as they are now: torch's helper remembers files by their names, and these change."""
    files = sorted(Path(plan_dir).glob("*.plan.json")) if plan_dir else []
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise PlanMismatchError(f"{file} cannot be read: {error.strerror}.") from None
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest() if files else ""
