"""The C++ side of the fake device."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_remat._torch.fake_cuda import hooks


def test_the_library_lies_in_the_cache_and_belongs_to_its_torch_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = hooks.library()
    assert first.is_relative_to(tmp_path) and first == hooks.library()
    other = tmp_path / "hooks.cpp"
    other.write_text(hooks.SOURCE.read_text() + "// more\n")
    monkeypatch.setattr(hooks, "SOURCE", other)
    assert hooks.library() != first
    monkeypatch.setattr(hooks, "version", lambda name: "9.9")
    assert "9.9" in hooks.library().name


def test_a_process_that_has_torch_is_refused() -> None:
    with pytest.raises(RuntimeError, match="before torch is imported"):
        hooks.register()


def test_a_source_that_does_not_build_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if hooks.shutil.which(hooks.COMPILER) is None:
        pytest.skip("g++ is missing")
    wrong = tmp_path / "hooks.cpp"
    wrong.write_text("no C++")
    monkeypatch.setattr(hooks, "SOURCE", wrong)
    with pytest.raises(RuntimeError, match=r"cannot build the hooks of the fake device: .*error"):
        hooks._build(tmp_path, tmp_path / "hooks.so")
    assert not (tmp_path / "hooks.so").exists()
