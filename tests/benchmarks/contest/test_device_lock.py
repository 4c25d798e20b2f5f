"""A process uses the device alone, but others may while it compiles."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.contest.device_lock import alone_but_to_compile


def test_others_may_run_only_while_torch_compiles(tmp_path: Path, own_caches: None) -> None:
    path, seen = tmp_path / "lock", dict[str, bool]()

    def is_free() -> bool:
        with path.open("a") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        seen["compiling"] = is_free()

        def run(*args: Tensor) -> object:
            seen["running"] = is_free()
            return gm.forward(*args)

        return run

    with alone_but_to_compile(path):
        seen["begin"] = is_free()
        assert torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.zeros(3)).tolist() == [1.0] * 3
        seen["end"] = is_free()
    assert seen == {"begin": False, "compiling": True, "running": False, "end": False}
    assert is_free()


def test_a_failing_compilation_leaves_the_device(tmp_path: Path, own_caches: None) -> None:
    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        raise RuntimeError("no code")

    with pytest.raises(Exception, match="no code"), alone_but_to_compile(tmp_path / "lock"):
        torch.compile(lambda x: x.sin(), backend=backend)(torch.zeros(3))
    with alone_but_to_compile(tmp_path / "lock"):
        pass  # it would wait for ever
