"""The garbage collector is as before behind `collector_paused`."""

import gc

import pytest

from compile_remat._util.collector import collector_paused


@collector_paused()
def _is_enabled_inside(error: Exception | None = None) -> bool:
    if error is not None:
        raise error
    return gc.isenabled()


def test_it_is_off_inside_and_on_again_behind():
    assert not _is_enabled_inside()
    assert gc.isenabled()
    with collector_paused():
        assert not _is_enabled_inside()
        assert not gc.isenabled()  # the inner pause leaves it as it found it
    assert gc.isenabled()


def test_an_exception_leaves_it_on():
    with pytest.raises(KeyError):
        _is_enabled_inside(KeyError("x"))
    assert gc.isenabled()


def test_whoever_turned_it_off_finds_it_off():
    gc.disable()
    try:
        assert not _is_enabled_inside()
        assert not gc.isenabled()
    finally:
        gc.enable()
