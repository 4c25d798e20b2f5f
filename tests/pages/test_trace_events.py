"""The trace for Perfetto: its slices and counters are the figures."""

import json
from dataclasses import replace

import pytest

from compile_remat.pages.trace_events import BACKWARD, FORWARD, chrome_trace
from tests.pages.examples import MIB, large, small


def test_a_node_is_a_slice() -> None:
    slices = [event for event in chrome_trace(small())["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["tid"], e["cat"], e["ts"], e["dur"]) for e in slices] == [
        ("a", FORWARD, "forward", 0.0, 1.0),
        ("b", FORWARD, "forward", 1.0, 0.5),
        ("end of the forward", FORWARD, "forward", 1.5, 0.0),
        ("b", BACKWARD, "recomputed", 1.5, 0.5),
        ("g", BACKWARD, "backward", 2.0, 2.0),
        ("output", BACKWARD, "backward", 4.0, 0.0),
    ]
    assert slices[0]["args"] == {
        "live bytes": 4 * MIB,
        "bytes": 4 * MIB,
        "shape": [1024, 1024],
        "dtype": "float32",
        "fate": "saved for the backward",
        "module": "body.0",
        "source": "/u/m.py:3",
    }


def test_counters_are_the_live_bytes() -> None:
    counters = [event for event in chrome_trace(small())["traceEvents"] if event["ph"] == "C"]
    live = [e["args"] for e in counters if e["name"] == "live bytes"]
    assert [sum(areas.values()) for areas in live] == list(small().known_step().live_bytes)
    assert live[3] == {"output": MIB, "gradient": 0, "saved": 4 * MIB, "recomputed": 3 * MIB, "temporary": MIB}
    assert [e["args"]["bytes"] for e in counters if e["name"] == "live bytes of plain torch.compile"][2] == 12 * MIB
    assert {e["args"]["bytes"] for e in counters if e["name"] == "budget"} == {10 * MIB}


def test_the_trace_is_json_in_order_of_time() -> None:
    events = json.loads(json.dumps(chrome_trace(large())))["traceEvents"]
    for phase in "XC":
        times = [event["ts"] for event in events if event["ph"] == phase]
        assert times and times == sorted(times)
    assert {event["pid"] for event in events} == {0}


def test_without_tensors_there_is_no_trace() -> None:
    with pytest.raises(ValueError, match="plan again"):
        chrome_trace(replace(small(), step=None))
