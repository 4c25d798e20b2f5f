"""The mesh as it is written."""

from __future__ import annotations

import pytest

from compile_remat.errors import ConfigError
from compile_remat.forecast.mesh.layout import MeshLayout


def test_a_mesh_is_read() -> None:
    layout = MeshLayout.parse("tp=2, dp=8", "fsdp2")
    assert (layout.dp, layout.tp, layout.num_ranks, str(layout)) == (8, 2, 16, "dp=8,tp=2")
    assert layout.data_ranks == (0, 2, 4, 6, 8, 10, 12, 14)  # neighbours are tensor parallel
    assert layout.is_fsdp and not MeshLayout.parse("tp=4").is_fsdp


@pytest.mark.parametrize(
    ("written", "settings", "text"),
    [
        ("dp=8,xp=2", {}, "'xp' is no dimension. Allowed: dp, tp"),
        ("", {}, "'' is no dimension"),
        ("dp", {}, "write each dimension once with its size"),
        ("dp=0", {}, "write each dimension once with its size"),
        ("dp=-2", {}, "write each dimension once with its size"),
        ("dp=2,dp=2", {}, "write each dimension once with its size"),
        ("dp=2", {"shard": "fdsp2"}, 'Did you mean "fsdp2"'),
        ("dp=2", {"node_size": 0}, "must be at least 1"),
        ("dp=2", {"reshard": False}, "reshard_after_forward is a setting of FSDP2"),
    ],
)
def test_what_is_no_mesh_is_refused(written: str, settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MeshLayout.parse(written, **settings)  # type: ignore[arg-type]
