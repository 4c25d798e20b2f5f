"""Times the operators of a graph before it is planned: finds them, reads and extends the file of times, agrees with other ranks."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from compile_remat._torch import cache_key_text
from compile_remat._torch.sizes import hint_int
from compile_remat._util.host import host_free_bytes, processor_name
from compile_remat._util.progress import progress_bar
from compile_remat.cost_models import CannotTime, Clock, ProfileFile, Recipe, Times, recipe_of, tf32_kinds, time_ns
from compile_remat.device import free_memory
from compile_remat.errors import warn
from compile_remat.inductor.peek import look_at_joint_graph
from compile_remat.ranks.agreement import Agreement

LOG = logging.getLogger("compile_remat")


def times_for(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    place: torch.device,
    patches: Mapping[str, Any],
    compiler: str,
    agreement: Agreement | None = None,
) -> Times:
    """Returns times of the operators in the joint graph of a Dynamo graph; measures operators that no earlier run measured.

    Args:
        place: The device that the graph runs on.
        patches: Inductor's options; the joint graph depends on them.
        compiler: `inductor` or `eager`.
        agreement: Agreement of the ranks that compile this graph: rank 0 measures, and all ranks take its times.
    """

    def measure() -> dict[str, int]:
        return dict(_times_here(gm, example_inputs, place, patches, compiler).by_signature)

    return Times.of(measure() if agreement is None else agreement.from_rank_zero(measure))


def times_of(graph: fx.Graph, clock: Clock | None = None) -> Times:
    """Returns times of a joint graph's operators on the device of its tensors; measures operators that no earlier run measured."""
    values = [node.meta.get("val") for node in graph.nodes]
    devices = [v.device for v in values if isinstance(v, torch.Tensor)]
    place = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    return Times.of(_measured(_recipes(graph.nodes), _file(place), place, clock))


def known_times(place: torch.device) -> Times:
    """Returns all times measured on this device before, for graphs whose operators cannot be timed before planning."""
    return Times.of(_file(place).times_ns())


# -- which operators --------------------------------------------------------------------------------------------------


def _times_here(
    gm: fx.GraphModule, example_inputs: Sequence[Any], place: torch.device, patches: Mapping[str, Any], compiler: str
) -> Times:
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return Times()  # no backward: nothing is planned
    file = _file(place)
    try:
        graph = _name_of(gm, example_inputs, patches, compiler)
        signatures = file.signatures_of(graph)
        known = file.times_ns()
        if signatures is not None and all(s in known for s in signatures):
            return Times.of({s: known[s] for s in signatures})
        found = _measured(_recipes(_joint_nodes(gm, example_inputs, patches, compiler)), file, place)
    except Exception as error:  # the other ranks wait for an answer, and a graph can be planned without times
        LOG.warning("the operators of a graph cannot be timed", exc_info=True)
        warn(
            f"the operators of a graph cannot be timed ({type(error).__name__}: {error}); their times are estimated "
            "(cost_model = roofline)"
        )
        return Times()
    file.note(graph, list(found))
    return Times.of(found)


def _name_of(gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any], compiler: str) -> str:
    sizes = [f"{s}={hint_int(s)}" for s in example_inputs if isinstance(s, torch.SymInt)]
    text = [cache_key_text.compilation_text(gm, example_inputs), repr(sorted(patches.items())), compiler, *sizes]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _joint_nodes(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any], compiler: str
) -> list[fx.Node]:
    return look_at_joint_graph(gm, example_inputs, lambda joint, _: list(joint.graph.nodes), patches, compiler) or []


def _recipes(nodes: Iterable[fx.Node]) -> list[Recipe]:
    """Returns the recipes of the nodes in order, each signature once."""
    found = (recipe_of(node) for node in nodes)
    return list({recipe.signature: recipe for recipe in found if recipe is not None}.values())


# -- measuring --------------------------------------------------------------------------------------------------------


def _measured(
    recipes: Sequence[Recipe], file: ProfileFile, place: torch.device, clock: Clock | None = None
) -> dict[str, int]:
    """Returns times by signature for all recipes that can be timed; writes each new time to the file before the next begins."""
    known = file.times_ns()
    missing = [recipe for recipe in recipes if recipe.signature not in known]
    if missing:
        with progress_bar(f"timing operators on {file.place}", len(missing)) as advance:
            for recipe in missing:
                try:
                    known[recipe.signature] = time_ns(recipe, place, _free_bytes(place), clock)
                    file.add({recipe.signature: known[recipe.signature]})
                except CannotTime as error:
                    LOG.info(
                        "%s cannot be timed, and cost_model = roofline estimates its time: %s", recipe.signature, error
                    )
                advance()
        if place.type == "cuda":
            torch.cuda.empty_cache()
    return {recipe.signature: known[recipe.signature] for recipe in recipes if recipe.signature in known}


def _free_bytes(place: torch.device) -> int | None:
    return host_free_bytes() if place.type == "cpu" else free_memory.free_bytes(place)


def _file(place: torch.device) -> ProfileFile:
    """Returns the file of times for this device and torch version, and for a CPU's threads or a GPU's TF32 kinds."""
    if place.type == "cuda":
        facts = f"{torch.cuda.get_device_name(place)}, tf32 for {', '.join(tf32_kinds()) or 'nothing'}"
    else:
        facts = f"{processor_name()}, {torch.get_num_threads()} threads" if place.type == "cpu" else place.type
    text = f"{facts}, torch {torch.__version__}"
    slug = re.sub(r"[^a-z0-9]+", "-", facts.lower()).strip("-")[:40]
    name = f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    return ProfileFile(Path(cache_key_text.inductor_cache_folder()) / "remat" / "profiles" / name, text)
