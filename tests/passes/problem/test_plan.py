"""The plan as data and as text."""

import json
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat.passes.problem.plan import Plan, Status
from compile_remat.passes.problem.problem import SCHEMA

MIB = 1 << 20
PLAN = Plan(
    problem_key="0123456789abcdef",
    status=Status.FEASIBLE,
    budget_bytes=8 * MIB,
    saved=("mm", "relu"),
    recomputed=("sin",),
    peak_bytes=7 * MIB,
    forward_peak_bytes=5 * MIB,
    saved_bytes=3 * MIB,
    once_time_ns=10_000_000,
    recompute_time_ns=500_000,
    extra_time_ns=400_000,
    bound_time_ns=300_000,
    largest=(
        LiveBuffer("mm", 2 * MIB, (512, 1024), "float32", "0.proj", "model.py:12", "saved"),
        LiveBuffer("sin", MIB, (), "bfloat16", "", "model.py:9", "recomputed"),
    ),
    simulations=17,
)
BARE = Plan("", Status.OPTIMAL, None, (), (), 0, 0, 0, 0, 0, 0, 0)

sizes = st.integers(0, 1 << 50)
words = st.text(max_size=6)
names = st.lists(words, max_size=4).map(tuple)
buffers = st.builds(LiveBuffer, words, sizes, st.lists(sizes, max_size=3).map(tuple), words, words, words, words)
plans = st.builds(
    Plan,
    problem_key=words,
    status=st.sampled_from(Status),
    budget_bytes=st.none() | sizes,
    saved=names,
    recomputed=names,
    peak_bytes=sizes,
    forward_peak_bytes=sizes,
    saved_bytes=sizes,
    once_time_ns=sizes,
    recompute_time_ns=sizes,
    extra_time_ns=sizes,
    bound_time_ns=sizes,
    largest=st.lists(buffers, max_size=3).map(tuple),
    simulations=sizes,
)

# -- JSON -------------------------------------------------------------------------------------------------------------


@given(plans)
def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)  # tuples all the way down
    assert again.status is plan.status


def test_json_names_the_status_and_the_schema() -> None:
    """A reworded message must not make old plan files unreadable."""
    data = json.loads(PLAN.to_json())
    assert (data["schema"], data["status"], data["saved"]) == (SCHEMA, "FEASIBLE", ["mm", "relu"])


def test_json_can_be_compared_line_by_line() -> None:
    lines, other = (p.to_json().splitlines() for p in (PLAN, replace(PLAN, saved=("mm", "cos"))))
    assert [(a, b) for a, b in zip(lines, other, strict=True) if a != b] == [('  "relu"', '  "cos"')]


@pytest.mark.parametrize("schema", [None, 0, SCHEMA + 1, str(SCHEMA)])
def test_another_schema_is_refused(schema: object) -> None:
    data = {**json.loads(PLAN.to_json()), "schema": schema}
    with pytest.raises(ValueError, match=f"not a plan of schema {SCHEMA}"):
        Plan.from_json(json.dumps(data))


OLD = """{
 "schema": 1, "problem_key": "0123456789abcdef", "status": "FEASIBLE", "budget_bytes": 8388608, "saved": ["mm", "relu"],
 "recomputed": ["sin"], "peak_bytes": 7340032, "forward_peak_bytes": 5242880, "saved_bytes": 3145728, "step_time_ns": 10000000,
 "recompute_time_ns": 500000, "extra_time_ns": 400000, "bound_time_ns": 300000,
 "largest": [
  {"name": "mm", "nbytes": 2097152, "shape": [512, 1024], "dtype": "float32", "module_path": "0.proj",
   "source_line": "model.py:12", "role": "saved"},
  {"name": "sin", "nbytes": 1048576, "shape": [], "dtype": "bfloat16", "module_path": "", "source_line": "model.py:9",
   "role": "recomputed"}
 ],
 "output_bytes": 0, "input_copy_bytes": 0, "simulations": 17, "again": [], "least_peak_bytes": 0, "sliced": [],
 "narrowed": [], "saving_time_ns": 0, "plain_time_ns": null
}"""
"""A file of a version that could save values in fewer bits."""


def test_a_file_with_a_field_that_is_gone_is_read() -> None:
    assert Plan.from_json(OLD) == PLAN


@pytest.mark.parametrize("narrowed", ['["relu"]', "7", "null"])
def test_a_plan_that_saves_values_in_fewer_bits_is_refused(narrowed: str) -> None:
    with pytest.raises(ValueError, match="it saves values in fewer bits"):
        Plan.from_json(OLD.replace('"narrowed": []', f'"narrowed": {narrowed}'))


@pytest.mark.parametrize("text", ["{}", "[]", "1", "null", '"plan"', "{"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Plan.from_json(text)


# -- text -------------------------------------------------------------------------------------------------------------


def test_text() -> None:
    assert_expected_inline(
        str(PLAN),
        """\
Plan
  status          feasible: fits the budget; the gap says how much faster another plan could be at most
  budget          8.0 MiB
  predicted peak  7.0 MiB (forward 5.0 MiB)
  saved           3.0 MiB in 2 tensors
  recomputed      1 values, 500 us (4.8% of the step); saving takes 0.0 ns (the fastest plan: 100 us for both)
  step            10.5 ms, the fastest plan 10.1 ms (estimated)
  extra time      400 us (+3.96%)
  lower bound     300 us (+2.97%), gap 0.99%
  largest at the peak:
       2.0 MiB  float32[512, 1024]  mm (saved)  0.proj (model.py:12)
       1.0 MiB  bfloat16[]  sin (recomputed)  (model.py:9)""",
    )


def test_text_says_why_much_that_is_recomputed_is_no_extra_time() -> None:
    plan = replace(PLAN, recompute_time_ns=3_600_000, saving_time_ns=400_000, plain_time_ns=14_000_000)
    lines = [line.strip() for line in str(plan).splitlines()]
    assert (
        "recomputed      1 values, 3.60 ms (25.7% of the step); saving takes 400 us (plain torch.compile: 4.00 ms for both)"
        in lines
    )
    assert "step            14.0 ms, plain torch.compile 14.0 ms (estimated)" in lines
    assert "extra time      0.0 ns (+0.00%)" in lines and "lower bound     -100 us (-0.71%), gap 0.71%" in lines


def test_text_of_an_empty_plan() -> None:
    """No budget, no largest tensors, and a step of no time."""
    lines = str(BARE).splitlines()
    assert lines[2].split() == ["budget", "none"] and lines[-2].split() == ["extra", "time", "0.0", "ns", "(+0.00%)"]
    assert lines[-1].strip() == "lower bound     0.0 ns (+0.00%), gap 0.00%"


def test_text_of_every_status() -> None:
    assert_expected_inline(
        "\n".join(
            f"{status.name}: {str(replace(PLAN, status=status)).splitlines()[1].split(maxsplit=1)[1]}"
            for status in Status
        ),
        """\
OPTIMAL: optimal: no plan within the budget is faster
FEASIBLE: feasible: fits the budget; the gap says how much faster another plan could be at most
OVER_BUDGET: over budget: no plan found fits; this is the lowest one, which runs unless the budget is in bytes
REPLAYED: replayed: read from a plan file
FALLBACK: fallback: torch's own choice, because the planner failed""",
    )


@pytest.mark.parametrize("status", Status)
def test_feasible_means_within_the_bytes_that_were_asked_for(status: Status) -> None:
    plan = replace(PLAN, status=status, peak_bytes=7 * MIB)
    assert [replace(plan, budget_bytes=b).is_feasible for b in (None, 8 * MIB, 7 * MIB, 7 * MIB - 1)] == [
        True, True, True, False,
    ]  # fmt: skip
