"""Settings: every form of every value, where it may come from, and what is said about a bad one."""

import copy
import dataclasses
import logging
import math
import os
import pickle
import re
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_remat import config
from compile_remat._util.units import GIB, MIB
from compile_remat._util.user_pass import UserPass
from compile_remat.budget import MemoryBudget, OptimizerState, Reserve
from compile_remat.config import RematConfig, split_options
from compile_remat.errors import ConfigError, PlannerWarning

MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def error_of(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        RematConfig.resolve(options, {}, modes=MODES)
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "budget"),
    [
        ("8GiB", MemoryBudget("bytes", 8 * GIB)),
        ("8GB", MemoryBudget("bytes", 8 * 10**9)),
        (" 500 mib ", MemoryBudget("bytes", 500 * MIB)),
        ("3B", MemoryBudget("bytes", 3)),
        (MIB, MemoryBudget("bytes", MIB)),
        (str(MIB), MemoryBudget("bytes", MIB)),
        (8e9, MemoryBudget("bytes", 8 * 10**9)),
        (np.int64(2 * MIB), MemoryBudget("bytes", 2 * MIB)),
        (10**400, MemoryBudget("bytes", 10**400)),
        (0.5, MemoryBudget("fraction", 0.5)),
        ("0.5", MemoryBudget("fraction", 0.5)),
        (".25", MemoryBudget("fraction", 0.25)),
        ("5e-1", MemoryBudget("fraction", 0.5)),
        (np.float32(0.5), MemoryBudget("fraction", 0.5)),
        (Fraction(1, 4), MemoryBudget("fraction", 0.25)),
        (1, MemoryBudget("max")),
        ("1", MemoryBudget("max")),
        (1.0, MemoryBudget("max")),
        ("min", MemoryBudget("min")),
        ("MAX", MemoryBudget("max")),
        (" auto", MemoryBudget("auto")),
        (MemoryBudget("min"), MemoryBudget("min")),
    ],
)
def test_memory_budget_forms(raw: object, budget: MemoryBudget) -> None:
    parsed = MemoryBudget.parse(raw)
    assert parsed == budget
    assert type(parsed.value) is type(budget.value)
    assert MemoryBudget.parse(str(parsed)) == parsed
    assert hash(parsed) == hash(budget)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("8 gigs", 'Did you mean "8GiB"?'),
        ("8G", 'Did you mean "8GiB"?'),
        ("50%", 'Did you mean "0.5"?'),
        ("autp", 'Did you mean "auto"?'),
        ("minimum", "is not a size"),
        (8, 'has no unit; write "8MiB" or "8GiB"'),
        ("500", 'has no unit; write "500MiB"'),
        (1.5, 'has no unit; write "1.5MiB"'),
        (MIB - 1, "has no unit"),
        (math.nextafter(1, 2), "has no unit"),
        (MIB + 0.5, "not a whole number of bytes"),
        (0, "is zero"),
        ("0", "is zero"),
        ("0GiB", "is zero"),
        (0.0, "is zero"),
        (-1, "is negative"),
        (-0.5, "is negative"),
        ("-8GiB", "is negative"),
        ("-8", "is negative"),
        (math.nan, "not a finite number"),
        ("nan", "not a finite number"),
        ("nanGiB", "is not a size"),
        ("0MiB", "is zero"),
        (math.inf, "not a finite number"),
        ("-inf", "not a finite number"),
        ("1e999", "not a finite number"),
        (True, "truth value"),
        (False, "truth value"),
        (None, "is not a size"),
        ("", "is not a size"),
        ("true", "is not a size"),
        ([8], "is not a size"),
    ],
)
def test_memory_budget_refuses(raw: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryBudget.parse(raw)
    text = str(caught.value)
    assert said in text
    assert repr(raw) in text
    assert 'Allowed: a size with its unit ("8GiB"' in text
    assert text.isascii()


@given(st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True) | st.integers(min_value=MIB))
def test_memory_budget_round_trips(raw: float) -> None:
    budget = MemoryBudget.parse(raw)
    assert MemoryBudget.parse(str(budget)) == budget == MemoryBudget.parse(str(raw))
    assert budget.value == raw


@pytest.mark.parametrize(
    ("raw", "shown", "kept"),
    [
        ("5%", "5%", 50),
        ("5.0 %", "5%", 50),
        ("2.5%", "2.5%", 25),
        ("0.01%", "0.01%", 1),
        ("0%", "0%", 0),
        ("2KiB", "2KiB", 2048),
        (0, "0B", 0),
        ("0", "0B", 0),
        (2 * MIB, "2MiB", 2 * MIB),
    ],
)
def test_reserve(raw: object, shown: str, kept: int) -> None:
    reserve = Reserve.parse(raw)
    assert str(reserve) == shown
    assert reserve.of(1000) == kept
    assert Reserve.parse(shown) == reserve


@pytest.mark.parametrize("raw", ["100%", "-1%", "%", "nan%", "five", 5, 0.05, "-1GiB", None, True])
def test_reserve_refuses(raw: object) -> None:
    with pytest.raises(ConfigError, match="Allowed: a percentage"):
        Reserve.parse(raw)


@pytest.mark.parametrize(
    ("raw", "shown", "state_bytes"),
    [("none", "none", 0), ("SGD", "sgd", 100), ("adamw", "adamw", 200), ("3KiB", "3KiB", 3072), (MIB, "1MiB", MIB)],
)
def test_optimizer_state(raw: object, shown: str, state_bytes: int) -> None:
    state = OptimizerState.parse(raw)
    assert str(state) == shown
    assert state.of(100) == state_bytes
    assert OptimizerState.parse(shown) == state


@pytest.mark.parametrize(("raw", "said"), [("adam", '"adamw"?'), ("lion", "Allowed"), (2, "no unit"), (-1, "negative")])
def test_optimizer_state_refuses(raw: object, said: str) -> None:
    with pytest.raises(ConfigError, match="Allowed") as caught:
        OptimizerState.parse(raw)
    assert said in str(caught.value)


def test_defaults() -> None:
    defaults = RematConfig.resolve({}, {})
    assert defaults == RematConfig()
    expected = {
        "memory_budget": "auto",
        "device": "detect",
        "capacity": "None",
        "reserve": "5%",
        "optimizer_state": "adamw",
        "instances": "None",
        "cost_model": "roofline",
        "compiler": "inductor",
        "mode": "None",
        "check": "False",
        "time_limit": "None",
        "gradients": "end",
        "oom_retry": "1",
        "slices": "off",
        "offload": "off",
        "host_memory": "25%",
        "inputs": "as_plain",
        "joint_passes": "None",
        "narrow": "off",
        "rank_timeout": "60",
        "report_dir": "None",
        "plan_dir": "None",
        "log": "None",
    }
    found = {row.name: str(getattr(defaults, row.name)) for row in dataclasses.fields(defaults)}
    assert found == expected, "a new setting, or another default, has its row in `expected` of tests/test_config.py"


def test_every_default_is_what_its_parser_makes_of_its_text() -> None:
    texts = {row.name: str(getattr(RematConfig(), row.name)) for row in dataclasses.fields(RematConfig)}
    assert RematConfig.resolve(texts, {}) == RematConfig()


def test_options_beat_environment_beat_defaults() -> None:
    environ = {"REMAT_MEMORY_BUDGET": "1GiB", "REMAT_COMPILER": "eager", "REMAT_LOG": "  "}
    resolved = RematConfig.resolve({"memory_budget": "2GiB"}, environ)
    assert resolved.memory_budget == MemoryBudget("bytes", 2 * GIB)
    assert resolved.compiler == "eager"
    assert resolved.log is None
    assert RematConfig.resolve({"memory_budget": None}, environ).memory_budget == MemoryBudget("bytes", GIB)


def test_an_option_can_switch_off_what_the_environment_sets() -> None:
    environ = {"REMAT_PLAN_DIR": "plans", "REMAT_REPORT_DIR": "reports", "REMAT_MODE": "max-autotune"}
    assert RematConfig.resolve({}, environ).plan_dir == os.path.abspath("plans")
    off = RematConfig.resolve({"plan_dir": "none", "report_dir": "None", "mode": "none"}, environ)
    assert (off.plan_dir, off.report_dir, off.mode) == (None, None, None)


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_MEMORY_BUDGET", "0.5")
    assert RematConfig.resolve().memory_budget == MemoryBudget("fraction", 0.5)
    monkeypatch.delenv("REMAT_MEMORY_BUDGET")
    assert RematConfig.resolve().memory_budget == MemoryBudget("auto")


def test_a_bad_value_says_what_where_and_what_is_allowed() -> None:
    assert error_of(memory_budget="8 gigs") == (
        "memory_budget = '8 gigs' (from the option 'memory_budget'): '8 gigs' is not a size. Did you mean \"8GiB\"? "
        f"Allowed: {config_forms()}."
    )
    with pytest.raises(ConfigError, match=r"from the environment variable REMAT_RESERVE\): 'lots'"):
        RematConfig.resolve({}, {"REMAT_RESERVE": "lots"})


def config_forms() -> str:
    return (
        'a size with its unit ("8GiB", "8GB", "500MiB"), an int of at least 1 MiB (1048576) in bytes, '
        'a fraction in (0, 1] of what plain torch.compile takes, "min", "max" or "auto"'
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compiler": "inducter"}, 'Allowed: inductor, eager. Did you mean "inductor"?'),
        ({"compiler": 3}, "3 is not a choice. Allowed: inductor, eager."),
        ({"cost_model": "rooflin"}, 'Allowed: roofline, profile, unit. Did you mean "roofline"?'),
        ({"cost_model": "measured"}, "'measured' is not a choice. Allowed: roofline, profile, unit."),
        (
            {"time_limit": "soon"},
            "'soon' is not a choice. Allowed: a number of seconds above 0, up to 1000000, or none.",
        ),
        ({"time_limit": "1e308"}, "'1e308' is not a choice. Allowed: a number of seconds above 0, up to 1000000"),
        ({"time_limit": 0}, "0 is not a choice. Allowed: a number of seconds above 0"),
        ({"time_limit": "nan"}, "'nan' is not a choice. Allowed: a number of seconds above 0"),
        ({"time_limit": True}, "True is not a choice. Allowed: a number of seconds above 0"),
        ({"log": "verbose"}, "Allowed: warning, info, debug."),
        ({"mode": "max-autotun"}, 'Did you mean "max-autotune" or "max-autotune-no-cudagraphs"?'),
        ({"mode": 1}, "1 is not a mode"),
        ({"device": ""}, "is not a device"),
        ({"device": 7}, "7 is not a device"),
        ({"report_dir": 7}, "7 is not a path"),
        ({"check": "yes"}, "'yes' is not a choice. Allowed: 0, 1."),
        ({"check": 2}, "2 is not a choice. Allowed: 0, 1."),
        ({"plan_dir": " "}, "is not a path"),
    ],
)
def test_bad_choices(options: dict[str, object], said: str) -> None:
    text = error_of(**options)
    (name,) = options
    assert said in text
    assert text.startswith(f"{name} = {options[name]!r} (from the option {name!r}): ")


def test_check_is_a_switch() -> None:
    assert not RematConfig().check
    for raw in ("1", 1, True, " 1 ", "True"):
        assert RematConfig.resolve({"check": raw}, {}).check is True
    assert RematConfig.resolve({"check": 0}, {"REMAT_CHECK": "1"}).check is False
    assert RematConfig.resolve({}, {"REMAT_CHECK": "1"}).check is True


def test_modes_are_checked_only_where_the_caller_knows_them() -> None:
    assert RematConfig.resolve({"mode": "Max-Autotune"}, {}, modes=MODES).mode == "max-autotune"
    assert RematConfig.resolve({"mode": "of-a-later-torch"}, {}).mode == "of-a-later-torch"
    with pytest.raises(ConfigError, match="from the environment variable REMAT_MODE"):
        RematConfig.resolve({}, {"REMAT_MODE": "turbo"}, modes=MODES)


def test_device_and_folders_are_normalised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RematConfig.resolve({"device": " H100_SXM "}, {}).device == "h100-sxm"
    assert RematConfig.resolve({"device": "My_GPU.json"}, {}).device == str(tmp_path / "My_GPU.json")
    assert RematConfig.resolve({"device": Path("a.json")}, {}).device == str(tmp_path / "a.json")
    assert RematConfig.resolve({"plan_dir": "~/plans"}, {}).plan_dir == str(tmp_path / "plans")


def test_unknown_options_name_ours_and_inductors() -> None:
    with pytest.raises(ConfigError) as caught:
        split_options({"memory_bugdet": 1}, {"memory_planning", "max_autotune"})
    text = str(caught.value)
    assert text.startswith("'memory_bugdet' is not an option of the backend remat. Allowed: memory_budget, device, ")
    assert text.endswith('any option of Inductor. Did you mean "memory_budget" or "memory_planning" (Inductor)?')
    assert error_of(zzzzzz=1).endswith(f"{', '.join(row.name for row in dataclasses.fields(RematConfig))}.")
    with pytest.raises(ConfigError, match="option names are strings"):
        split_options({3: 1}, ())  # type: ignore[dict-item]


def test_split_options() -> None:
    options = {"memory-budget": "1GiB", "max-autotune": True, "triton.cudagraphs": False, "log": "info"}
    own, inductor = split_options(options, {"max_autotune", "triton.cudagraphs", "log"})
    assert own == {"memory_budget": "1GiB", "log": "info"}
    assert inductor == {"max_autotune": True, "triton.cudagraphs": False}
    assert RematConfig.resolve(own, {}).memory_budget == MemoryBudget("bytes", GIB)


@pytest.mark.parametrize(
    ("options", "environ", "where"),
    [
        ({"narrow": "AUTO"}, {}, "the option 'narrow'"),
        ({}, {"REMAT_NARROW": "auto"}, "the environment variable REMAT_NARROW"),
    ],
)
def test_narrow_says_once_that_it_does_nothing(options: dict[str, object], environ: dict[str, str], where: str) -> None:
    said = re.escape(f"narrow = auto (from {where}) does nothing any more and goes with the next version")
    with pytest.warns(PlannerWarning, match=said) as noted:
        for _ in range(3):
            assert RematConfig.resolve(options, environ).narrow == "auto"
    assert len(noted) == 1


@pytest.mark.parametrize("options", [{}, {"narrow": "off"}, {"narrow": None}])
def test_without_narrow_nothing_is_said(options: dict[str, object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RematConfig.resolve(options, {"REMAT_NARROW": ""}).narrow == "off"


def test_narrow_takes_no_other_value() -> None:
    assert "narrow = 'bits' (from the option 'narrow'): 'bits' is not a choice. Allowed: off, auto." in error_of(
        narrow="bits"
    )


class Pass:
    """A pass of the user with an identity."""

    def __init__(self, identity: object) -> None:
        self.identity = identity

    def __call__(self, graph: object) -> None:
        """Do nothing."""

    def uuid(self) -> object:
        return self.identity


def test_passes_are_known_by_their_identities() -> None:
    def passes(raw: object) -> tuple[UserPass, ...] | None:
        return RematConfig.resolve({"joint_passes": raw}, {}).joint_passes

    first, same, other = passes(Pass("a")), passes((Pass("a"),)), passes([Pass("b")])
    assert first is not None and first == same != other
    assert first[0].name == "Pass" and first[0].uuid is not None
    assert passes((Pass(b"a"), print)) == (UserPass.of(Pass(b"a")), UserPass(print, "print"))
    assert passes("none") is passes(()) is passes(None) is None
    assert RematConfig(joint_passes=first).joint_passes == first
    assert copy.deepcopy(first)[0] is first[0]  # the user's pass may hold a state


def test_values_that_are_no_passes() -> None:
    assert "3 is not callable. Allowed: a tuple of callables that take the joint fx.Graph, or none." in error_of(
        joint_passes=(print, 3)
    )
    assert "cannot be read: " in error_of(joint_passes=Pass(lambda: None))
    with pytest.raises(ConfigError) as caught:
        RematConfig.resolve({}, {"REMAT_JOINT_PASSES": "my_passes"})
    assert "(from the environment variable REMAT_JOINT_PASSES): a pass is a callable, not text" in str(caught.value)


def test_unknown_variables_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    config.warn_unknown_variable.cache_clear()
    with caplog.at_level(logging.WARNING, logger="compile_remat"):
        for _ in range(2):
            RematConfig.resolve({}, {"REMAT_MEMORY_BUDGT": "1GiB", "OTHER": "1"})
    assert [record.message for record in caplog.records] == [
        'environment variable REMAT_MEMORY_BUDGT is not a setting and is ignored. Did you mean "REMAT_MEMORY_BUDGET"?'
    ]


def test_config_is_a_frozen_value() -> None:
    one = RematConfig(memory_budget="1GiB")  # type: ignore[arg-type]
    two = RematConfig.resolve({"memory_budget": GIB}, {})
    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    assert dataclasses.replace(one, memory_budget="min").memory_budget == MemoryBudget("min")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.log = "info"  # type: ignore[misc]
    with pytest.raises(ConfigError, match="an argument of RematConfig"):
        RematConfig(memory_budget="lots")  # type: ignore[arg-type]


VALUES: dict[str, dict[object, object]] = {
    "slices": {"off": "off", " AUTO ": "auto", 16: 16, "64": 64, 1: "off", "1": "off"},
    "rank_timeout": {0: 0, "0": 0, "600": 600, 5: 5},
    "instances": {"learn": None, None: None, 3: 3, "12": 12},
    "oom_retry": {0: 0, "3": 3, 1: 1},
    "capacity": {"64GiB": 64 * GIB, GIB: GIB, "none": None, None: None},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_a_setting(name: str) -> None:
    resolved = {raw: RematConfig(**{name: raw}) for raw in VALUES[name]}  # type: ignore[arg-type]
    assert {raw: getattr(config, name) for raw, config in resolved.items()} == VALUES[name]


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("slices", (-1, 0, "many", 1.5, True, 1 << 20), "slices"),
        ("rank_timeout", (-1, "soon", 1.5, True, 10_000_000), "rank_timeout"),
        ("instances", (0, -1, "often", True, 1.5), "Allowed: learn"),
        ("oom_retry", (4, -1, "often", True, 1.5), "Allowed: 0, 1, 2, 3"),
        ("capacity", ("max", "0.5", 12, "lots", True), "capacity"),
    ],
)
def test_what_is_no_value_of_a_setting(name: str, values: tuple[object, ...], said: str) -> None:
    for raw in values:
        with pytest.raises(ConfigError, match=said):
            RematConfig(**{name: raw})  # type: ignore[arg-type]
