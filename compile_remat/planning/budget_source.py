"""Finds the budget that holds for a graph: the user's, or a ratio from torch's own settings."""

from __future__ import annotations

from dataclasses import dataclass

from compile_remat._torch import joint_graph
from compile_remat._util.units import in_one_unit
from compile_remat.budget import MemoryBudget
from compile_remat.errors import (
    ConfigError,
    SettingWarning,
    warn,
)
from compile_remat.passes import MUST_RECOMPUTE, PREFER_RECOMPUTE, Problem

CONFIG_NAME = "torch._functorch.config.activation_memory_budget"

REGION_NAME = "torch.autograd.graph.region_activation_memory_budget"


@dataclass(frozen=True)
class EffectiveBudget:
    """The budget that holds for one graph.

    Attributes:
        limit_bytes: Second limit beside a fraction: the free bytes that `auto` found.
        plain_bytes: Peak of plain torch.compile, which a fraction multiplies.
        source: Origin of a budget that may be exceeded, in words; empty if exceeding the budget is an error.
    """

    budget: MemoryBudget
    limit_bytes: int | None = None
    source: str = ""
    plain_bytes: int = 0


def effective_budget(
    joint: joint_graph.Joint, budget: MemoryBudget, *, is_given: bool, from_auto: bool, ratio: float
) -> EffectiveBudget:
    """Returns `budget` if the user gave one, else the ratio from the graph's annotated regions or torch's setting, if any.

    A ratio of torch's becomes a fraction of the peak of plain torch.compile for this graph; ratio 0 becomes `min`, and ratio 1
    leaves `budget` as it is.  (In torch, a ratio scales the saved bytes, between those of the inputs and those of the default.)
    As in torch, a ratio never raises an error: below the lowest reachable peak, the lowest plan runs with a warning.  The limit
    of `auto` holds beside a ratio, because `auto` only asks that the graph fits.

    Raises:
        ConfigError: The annotated regions have different ratios, or do not cover the whole forward.
    """
    annotated = joint_graph.annotated_ratios(joint.module, joint)
    source = source_of(budget, from_auto=from_auto)
    if is_given:
        if annotated.any or ratio < 1:
            warn_ignored(str(budget), REGION_NAME if annotated.ratios else CONFIG_NAME)
        return EffectiveBudget(budget, source=source)
    name = REGION_NAME if annotated.ratios else CONFIG_NAME
    ratio = _agreed(annotated, ratio)
    limit = int(budget.value or 0) if budget.kind == "bytes" else None
    if ratio == 0:
        return EffectiveBudget(MemoryBudget("min"))
    if ratio < 1:
        return EffectiveBudget(MemoryBudget("fraction", ratio), limit, f"{name} = {ratio:g}")
    return EffectiveBudget(budget, source=source)


def source_of(budget: MemoryBudget, *, from_auto: bool) -> str:
    """Returns, in words, the origin of a budget that may be exceeded (`auto` or a fraction); empty for a budget that must hold."""
    if from_auto:
        return "memory_budget = auto (the memory that is free)"
    return f"memory_budget = {budget}" if budget.kind == "fraction" else ""


def _agreed(annotated: joint_graph.Annotated, ratio: float) -> float:
    if not annotated.ratios:
        return ratio if annotated.legacy is None else annotated.legacy
    if len(annotated.ratios) > 1:
        raise ConfigError(
            f"{REGION_NAME} asks for {', '.join(f'{r:g}' for r in annotated.ratios)} in one graph, but a graph has one "
            "budget. Put a graph break (torch._dynamo.graph_break()) between the regions, use one ratio, or set "
            "memory_budget, which overrides them all."
        )
    if annotated.bare:
        raise ConfigError(
            f"{REGION_NAME} must cover the whole forward of a graph, and {len(annotated.bare)} of its operators lie "
            f"outside: {', '.join(annotated.bare[:5])}. Wrap the whole forward, put a graph break between the parts, or "
            "set memory_budget, which overrides it."
        )
    return annotated.ratios[0]


def warn_ignored(budget: str, name: str) -> None:
    warn(
        f"{name} is set, and so is memory_budget = {budget}, which wins. Leave memory_budget out to have the ratio obeyed.",
        SettingWarning,
    )


def bytes_of(effective: EffectiveBudget) -> int | None:
    """Returns the bytes that the peak of a plan may reach; None for `max` (speed only) and `min` (memory only)."""
    if effective.budget.kind == "fraction":
        budget_bytes = int(float(effective.budget.value or 0) * effective.plain_bytes)
        return min(budget_bytes, effective.limit_bytes or budget_bytes)
    return int(effective.budget.value or 0) if effective.budget.kind == "bytes" else None


def allowed_text(effective: EffectiveBudget, budget_bytes: int) -> str:
    """Returns the text of a message about a budget that may be exceeded: its origin and its bytes."""
    return _allowed_text(effective, *in_one_unit(budget_bytes, effective.plain_bytes))


def _allowed_text(effective: EffectiveBudget, allowed: str, plain: str) -> str:
    base = f"of {plain} under plain torch.compile" if effective.plain_bytes else ""
    origin = f"set by {effective.budget.origin}" if effective.budget.origin else ""
    facts = ", ".join(filter(None, (base, origin)))
    is_nothing = effective.budget.kind == "bytes" and (effective.budget.value or 0) <= 1  # `auto` where others take all
    return f"{effective.source} allows {'nothing' if is_nothing else allowed}" + f" ({facts})" * bool(facts)


def below_floor_text(effective: EffectiveBudget, budget_bytes: int, floor_bytes: int) -> str:
    """Returns the text of a message about a budget that may be exceeded, and that even the lowest plan exceeds."""
    allowed, plain, lowest = in_one_unit(budget_bytes, effective.plain_bytes, floor_bytes)
    return (
        f"{_allowed_text(effective, allowed, plain)}, which is less than the lowest reachable peak ({lowest}): "
        "the graph runs with its lowest plan"
    )


def checkpoints_text(effective: EffectiveBudget, problem: Problem) -> str:
    """Returns the text of a message about a fraction that no plan keeps; empty for a model without activation checkpoints.

    Plain torch.compile obeys them, so that its peak, of which the fraction is a share, is low already.  They do not raise the
    lowest reachable peak, because a plan may set them aside; that is why a budget in bytes needs no such text.
    """
    num = sum(value.tag in (MUST_RECOMPUTE, PREFER_RECOMPUTE) for value in problem.values)
    if effective.budget.kind != "fraction" or not num:
        return ""
    tensors = f"{num} tensor{'s' * (num > 1)}"
    return (
        f"the model's own activation checkpoints make this fraction so low: plain torch.compile obeys them ({tensors} may not be "
        "saved), and the fraction is a share of its peak; switch gradient checkpointing off (e.g. gradient_checkpointing=False) "
        "to let the planner choose"
    )
