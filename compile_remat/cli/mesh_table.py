"""`compile-remat plan MODEL --mesh dp=8,tp=2`: the bytes that one rank holds, and the time of its step."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from compile_remat._util.progress import Advance
from compile_remat._util.text_table import print_table
from compile_remat._util.units import format_bytes, format_time
from compile_remat._util.user_warnings import drop_held
from compile_remat.errors import ConfigError
from compile_remat.pages.figures import PLAIN

if TYPE_CHECKING:
    from compile_remat.forecast.builders import Builder
    from compile_remat.forecast.mesh.rank_figures import RankForecast
    from compile_remat.forecast.target_step import Target

_ONE_RANK_ONLY = (
    "devices",
    "compare",
    "html",
    "chrome_trace",
    "memory_snapshot",
    "no_largest_batch",
    "slices",
)
_MESH_ONLY = ("shard", "keep_gathered", "node_size", "network", "param_dtype", "reduce_dtype")


def add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the mesh, its sharding and its network."""
    parser.add_argument("--mesh", metavar="dp=N,tp=N", help="ranks that train together; prints what one of them holds")
    parser.add_argument("--shard", help="of dp: ddp, fsdp2 (blocks and model), fsdp2-whole (default ddp)")
    parser.add_argument("--keep-gathered", action="store_true", help="FSDP2's reshard_after_forward=False")
    parser.add_argument("--param-dtype", metavar="TYPE", help="FSDP2's mixed precision: gathered and computed in")
    parser.add_argument("--reduce-dtype", metavar="TYPE", help="the same of gradients that are reduced")
    parser.add_argument("--node-size", type=int, metavar="N", help="devices of a node (default 8)")
    parser.add_argument("--network", metavar="LINK", help="between nodes (default: the device's, see `devices`)")


def check_mesh_arguments(arguments: argparse.Namespace) -> None:
    """Refuse flags that need a mesh without one, and flags for one rank with a mesh.

    Raises:
        ConfigError: There is such a flag.
    """
    is_mesh = arguments.mesh is not None
    if is_mesh and arguments.gradients == "early":
        raise ConfigError("--gradients early does not go with --mesh.")
    for name in _ONE_RANK_ONLY if is_mesh else _MESH_ONLY:
        if getattr(arguments, name) not in (None, False):
            wants = "does not go with --mesh" if is_mesh else "needs --mesh, as in --mesh dp=8"
            raise ConfigError(f"--{name.replace('_', '-')} {wants}.")


def run_mesh_table(arguments: argparse.Namespace, builder: Builder, target: Target, advance: Advance) -> int:
    """Print the memory and the time of one rank's step; returns status 1 if it does not fit the device."""
    from compile_remat.forecast.mesh.layout import MeshLayout
    from compile_remat.forecast.mesh.rank_forecast import forecast_rank

    reshard = False if arguments.keep_gathered else None
    node_size = 8 if arguments.node_size is None else arguments.node_size
    dtypes = arguments.param_dtype, arguments.reduce_dtype
    layout = MeshLayout.parse(arguments.mesh, arguments.shard or "ddp", reshard, node_size, *dtypes)
    found = forecast_rank(builder, target, layout, arguments.network, advance)
    print(found.to_json()) if arguments.json else print_rank_forecast(found)
    return 1 if found.fits is False else 0


def print_rank_forecast(found: RankForecast) -> None:
    """Print the tables of a rank forecast."""
    from compile_remat.forecast.lowering.observing import facts_text
    from compile_remat.forecast.mesh.rank_figures import BY_RULES

    sizes = ", ".join(f"{name} {size}" for name, size in found.sizes.items())
    rows = [
        ("parameters, its part", format_bytes(found.parameter_bytes)),
        (f"optimizer state ({found.optimizer})", format_bytes(found.optimizer_bytes)),
        ("inputs", format_bytes(found.input_bytes)),
        ("graphs and gradients, at the step's peak", format_bytes(found.peak_moment.graph_bytes)),
        (f"{_wrapper(found)}, at the step's peak", format_bytes(found.peak_moment.wrapper_bytes)),
        ("sum", format_bytes(found.total_bytes)),
        ("the step's peak is at", str(found.peak_moment)),
        ("region peak, all graphs", format_bytes(found.peak_bytes)),
        *_host_rows(found),
        ("  lowest reachable peak", format_bytes(found.floor_bytes)),
        (f"{_wrapper(found)}, at most", format_bytes(found.beside_bytes)),
        ("  gathered parameters, of it", format_bytes(found.gathered_bytes)),
        ("gradients, when the step ends", format_bytes(found.gradient_bytes)),
    ]
    if found.limit_bytes is not None:
        rows.append(("capacity less the reserve", format_bytes(found.limit_bytes)))
        rows.append(("fits", "yes" if found.fits else "no"))
    plain_ns = found.kernel_time_ns - found.extra_time_ns
    rows += [
        (f"kernels, {PLAIN}", format_time(plain_ns)),
        ("kernels, as planned", f"{format_time(found.kernel_time_ns)} ({found.extra_time_ns / max(1, plain_ns):+.2%})"),
    ]
    if found.collective_time_ns is None or found.exposed_time_ns is None:
        rows.append(("collectives", "no price: this device's links are not known"))
    else:
        rows.append(("collectives", format_time(found.collective_time_ns)))
        rows.append(("  not hidden by kernels", format_time(found.exposed_time_ns)))
    rows.append(("step", format_time(found.step_time_ns)))
    dtype = found.dtype + (f", gathered in {found.param_dtype}" if found.param_dtype else "")
    title = f"{found.model} ({sizes} a rank; {dtype}), one of {found.num_ranks} x {found.device}, {found.mesh}, {found.shard}"
    print_table(title, ("", ""), rows)
    if len(found.graphs) > 1:
        _print_graphs(found)
    if found.message:
        print(f"note: {found.message}")
        drop_held(found.message)
    print(f"bytes of graphs: {facts_text(BY_RULES)}")
    print(f"worked out in {found.seconds:.0f} s, without the devices; times are the cost model's estimates")


def _host_rows(found: RankForecast) -> list[tuple[str, str]]:
    """Rows about tensors that wait in host memory; none if nothing leaves."""
    plans = [graph.plan for graph in found.graphs if graph.plan.offloaded]
    if not plans:
        return []
    return [
        ("on the host", format_bytes(sum(plan.offloaded_bytes for plan in plans))),
        ("  pinned memory there", format_bytes(found.host_bytes)),
        (f"  that of the {found.node_ranks} ranks of a node", format_bytes(found.node_host_bytes)),
        ("  copies prolong the step by", format_time(sum(plan.stall_time_ns for plan in plans))),
    ]


def _print_graphs(found: RankForecast) -> None:
    rows = [
        (graph.name or "around the blocks", str(graph.calls), format_bytes(graph.plan.peak_bytes),
         format_bytes(graph.plan.held_bytes), format_time(graph.plan.time_ns),
         f"{graph.plan.extra_share:+.2%}")
        for graph in found.graphs
    ]  # fmt: skip
    print_table("its graphs", ("first seen in", "runs", "its own peak", "holds", "one run", "extra time"), rows)


def _wrapper(found: RankForecast) -> str:
    return "DDP's buckets" if found.shard == "ddp" else "FSDP2"
