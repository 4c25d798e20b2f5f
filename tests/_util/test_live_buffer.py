"""The text of a live buffer in an error."""

from dataclasses import replace

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat._util.units import MIB

BUFFER = LiveBuffer("addmm_3", 24 * MIB, (2048, 3072), "float32", "blocks.0.mlp", "model.py:12", "saved")


def test_text() -> None:
    assert str(BUFFER) == "  24.0 MiB  float32[2048, 3072]  addmm_3 (saved)  blocks.0.mlp (model.py:12)"
    assert str(replace(BUFFER, role="", shape=())) == "  24.0 MiB  float32[]  addmm_3  blocks.0.mlp (model.py:12)"


def test_an_origin_that_is_partly_or_wholly_unknown() -> None:
    assert str(replace(BUFFER, source_line="")).endswith("addmm_3 (saved)  blocks.0.mlp")
    assert str(replace(BUFFER, module_path="")).endswith("addmm_3 (saved)  (model.py:12)")
    assert str(replace(BUFFER, module_path="", source_line="")).endswith("addmm_3 (saved)  (origin unknown)")
