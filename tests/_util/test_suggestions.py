"""The nearest valid name to a mistyped one."""

from compile_remat._util.suggestions import closest, did_you_mean


def test_closest() -> None:
    valid = ["memory_budget", "mode", "device", "h100-sxm"]
    assert closest("memory-bugdet", valid) == "memory_budget"
    assert closest("H100_SXM5", valid) == "h100-sxm"
    assert closest("zzzz", valid) == ""
    assert closest("mode", []) == ""
    assert did_you_mean("mod", valid) == ' Did you mean "mode"?'
    assert did_you_mean("zzzz", valid) == ""
