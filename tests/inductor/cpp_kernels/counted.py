"""Watches what `compile_remat.inductor.cpp_kernels.building` builds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from compile_remat.inductor.cpp_kernels import building
from compile_remat.inductor.cpp_kernels.unit import Kernel


class Built:
    """The units that are built, and nothing else is known: kernels lie in a store that outlives a test.

    Attributes:
        units: The kernels of each unit, in the order of building.
        notes: The files that say where a kernel lies.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units: list[Sequence[Kernel]] = []
        self.notes: list[Path] = []
        start, place, find = building.start_building, building._place_of, building._function_in_cache

        def start_building(
            kernels: Sequence[Kernel], submit: Callable[..., Any] | None
        ) -> Callable[[], tuple[str, str]]:
            self.units.append(kernels)
            return start(kernels, submit)

        def note(key: str, *rest: Any) -> None:
            self.notes.append(place(key))
            write(key, *rest)

        write = building._note
        monkeypatch.setattr(building, "start_building", start_building)
        monkeypatch.setattr(building, "_note", note)
        monkeypatch.setattr(building, "_function_in_cache", lambda key: find(key) if place(key) in self.notes else None)
        building.forget_functions()

    def forget(self, *, keep_notes: bool = False) -> None:
        """Forget all kernels, as in a new process; with `keep_notes`, keep the files that say where kernels lie."""
        building.forget_functions()
        if not keep_notes:
            self.notes.clear()
