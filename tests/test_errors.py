"""The error family: texts that say what to do, and exceptions that survive a trip between processes."""

import copy
import pickle
import re
from dataclasses import replace

import pytest

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat._util.units import MIB, parse_bytes
from compile_remat.errors import (
    BudgetError,
    ConfigError,
    DeviceError,
    PlanMismatchError,
    PlannerWarning,
    RematError,
    SettingWarning,
    SharedBudgetError,
    TagConflictError,
)

TENSOR = LiveBuffer("addmm_3", 24 * MIB, (2048, 3072), "float32", "blocks.0.mlp", "model.py:12")


TAGGED = replace(TENSOR, name="mm", role="MUST_SAVE in checkpointed region 2")
CONFLICT = TagConflictError(10 * MIB, 44 * MIB, (TENSOR,), 20 * MIB, (TAGGED,) * 6)


def make(budget: int = 10 * MIB, floor: int = 44 * MIB + 1, count: int = 7) -> BudgetError:
    tensors = tuple(replace(TENSOR, name=f"t{i}", nbytes=(i + 1) * MIB) for i in range(count))
    return BudgetError(budget, floor, tensors)


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (ConfigError("a"), ValueError),
        (DeviceError("a"), ValueError),
        (PlanMismatchError("a"), RuntimeError),
        (make(), RuntimeError),
        (CONFLICT, BudgetError),
        (SharedBudgetError(10 * MIB, 44 * MIB, (TENSOR,), 3 * MIB), BudgetError),
        (SharedBudgetError(10 * MIB, 44 * MIB, num_runs=12), BudgetError),
    ],
)
@pytest.mark.parametrize("trip", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_family_and_round_trip(error: RematError, also: type[Exception], trip) -> None:  # type: ignore[no-untyped-def]
    assert isinstance(error, RematError)
    assert isinstance(error, also)
    back = trip(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_a_shared_budget_names_what_the_others_hold_or_how_much_runs() -> None:
    beside = str(SharedBudgetError(10 * MIB, 44 * MIB, (TENSOR,), 3 * MIB))
    assert "other graphs of the same step hold 3.0 MiB" in beside
    assert "the step comes to 44.0 MiB" in beside and "addmm_3" in beside
    whole = str(SharedBudgetError(10 * MIB, 44 * MIB, num_runs=12))
    assert "runs compiled graphs 12 times is 44.0 MiB" in whole and '"44MiB"' in whole


@pytest.mark.parametrize("warning", [PlannerWarning, SettingWarning])
def test_a_warning_is_no_error(warning: type[Warning]) -> None:
    assert issubclass(warning, UserWarning)
    assert not issubclass(warning, RematError)


def test_a_conflict_with_tags_says_what_they_hold_and_what_they_cost() -> None:
    lines = str(CONFLICT).splitlines()
    assert lines[0].startswith("no plan fits memory_budget = 10.0 MiB") and "44.0 MiB" in lines[0]
    assert lines[3:6] == [
        "The policy of selective checkpointing raises that peak: without MUST_SAVE and MUST_RECOMPUTE",
        "it is 20.0 MiB (20,971,520 bytes). The largest tensors with these tags:",
        f"  {TAGGED}",
    ]
    assert lines.count(f"  {TAGGED}") == 5 and lines[10] == "  and 1 more"
    assert "PREFER_SAVE" in lines[11] and lines[-1].startswith('What to do: set memory_budget to "44MiB"')
    assert str(CONFLICT).isascii()


def test_budget_error_text() -> None:
    error = BudgetError(10 * MIB, 44 * MIB + 1, (TENSOR, LiveBuffer("mm", 512, (), "bfloat16")))
    assert str(error) == (
        "no plan fits memory_budget = 10.0 MiB: the lowest reachable peak of this graph is 44.0 MiB\n"
        "(budget 10,485,760 bytes, lowest peak 46,137,345 bytes). "
        "The largest tensors live at that peak:\n"
        "    24.0 MiB  float32[2048, 3072]  addmm_3  blocks.0.mlp (model.py:12)\n"
        "       512 B  bfloat16[]  mm  (origin unknown)\n"
        "A smaller batch, shorter sequences or a lower precision lower it. Gradients and outputs cannot be recomputed.\n"
        'What to do: set memory_budget to "45MiB" or more, or to "min" for the lowest peak.'
    )
    assert str(error).isascii()


def test_budget_error_says_each_thing_once_in_lines_that_fit_a_page() -> None:
    shared = SharedBudgetError(10 * MIB, 44 * MIB, others_bytes=3 * MIB, written="10MiB")
    for error in (make(), CONFLICT, shared, BudgetError(MIB, 44 * MIB, (TENSOR,), "1MiB", "", 12 * MIB)):
        lines = str(error).splitlines()
        assert len({*lines} - {f"  {TAGGED}"}) == len([line for line in lines if line != f"  {TAGGED}"])
        assert max(map(len, lines)) <= (130 if error is shared else 110), max(lines, key=len)


@pytest.mark.parametrize(("written", "shown"), [("10MB", "10MB"), ("10000000", "9.5 MiB")])
def test_budget_error_begins_with_what_the_user_wrote_and_ends_with_what_is_enough(written: str, shown: str) -> None:
    first, second, *_, last = str(BudgetError(10_000_000, 44 * MIB, (TENSOR,), written)).splitlines()
    assert first.startswith(f"no plan fits memory_budget = {shown}: ") and "budget 10,000,000 bytes" in second
    assert last == 'What to do: set memory_budget to "44MiB" or more, or to "min" for the lowest peak.'


def test_budget_error_shows_the_five_largest_in_order() -> None:
    error = make()
    assert re.findall(r"\bt\d\b", str(error)) == ["t6", "t5", "t4", "t3", "t2"]
    assert len(error.largest) == 7


def test_budget_error_suggests_a_budget_that_is_enough() -> None:
    for floor in (1, MIB, MIB + 1, 3 * 2**30, 3 * 2**30 - 1):
        suggested = re.search(r'memory_budget to "(\w+)"', str(make(floor=floor)))
        assert suggested is not None
        assert floor <= parse_bytes(suggested[1]) < floor + MIB


def test_budget_error_without_tensors() -> None:
    assert "live at that peak" not in str(make(count=0))
    assert "The largest tensor live at that peak" in str(make(count=1))
