"""`compile-remat plan`, `pareto` and `explain`: plan a model's training step on a device that need not be here."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from compile_remat._util.collector import collector_paused
from compile_remat._util.log_output import torch_is_quiet
from compile_remat._util.progress import Display, progress_bar
from compile_remat._util.text_table import print_table
from compile_remat._util.units import format_bytes, format_time
from compile_remat._util.user_warnings import drop_held
from compile_remat.cli.device_table import devices_of, extra_time_text, run_device_table
from compile_remat.cli.mesh_table import add_mesh_arguments, check_mesh_arguments, run_mesh_table
from compile_remat.errors import RematError

if TYPE_CHECKING:
    from compile_remat.forecast.builders import Builder
    from compile_remat.forecast.forecasting import Forecast
    from compile_remat.forecast.second_process import Worker
    from compile_remat.forecast.target_step import Target
    from compile_remat.passes import Plan

_FILES = ("html", "chrome_trace", "memory_snapshot", "png", "svg")


def add_arguments(parser: argparse.ArgumentParser, *, has_devices: bool = False) -> None:
    """Add the flags of the model and the device; imports nothing heavy."""
    from compile_remat.forecast.zoo import BUILDERS

    parser.add_argument("model", help=f"pkg.module:build, or one of {', '.join(BUILDERS)}")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--device", help="a name that `compile-remat devices` prints, or a JSON file")
    if has_devices:
        where.add_argument("--devices", metavar="A,B,...", help="one table for several devices, or for `all`")
    parser.add_argument("--budget", default="auto", help="of the region peak, as memory_budget (default: what is left)")
    parser.add_argument("--batch", type=int, help="samples in a batch (default: the builder's)")
    parser.add_argument("--seq", type=int, help="tokens of a sequence (default: the builder's)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default: bf16 for names, else as built")
    parser.add_argument(
        "--optimizer", default="adamw", help="none, sgd, adamw, or the size of its state (default adamw)"
    )
    parser.add_argument(
        "--gradients", choices=("end", "early"), default="end", help="when they leave the backward (default end)"
    )
    parser.add_argument(
        "--inputs",
        choices=("as_plain", "constant"),
        default="as_plain",
        help="which inputs the backward may read again (default as_plain)",
    )
    parser.add_argument("--reserve", default="5%", help="kept free on the device (default 5%%)")
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        help="work of one search, counted, as time_limit (default: by the graph's size)",
    )
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="plan by rules, also where Inductor could lower the graphs for the device",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write one page with pictures of the plan and the frontier")


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `explain`."""
    add_arguments(parser)
    _add_slices(parser)
    _add_offload(parser)
    _add_traces(parser)


def _add_slices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slices", metavar="off|auto|N", help="rows of huge temporaries in slices (default off)")


def _add_offload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offload", choices=("off", "auto"), help="saved tensors wait in host memory (default off)")
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="the most that they may take there, of a node with --mesh (default no limit)",
    )


def _add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chrome-trace", metavar="FILE", help="write the predicted step for ui.perfetto.dev")
    parser.add_argument("--memory-snapshot", metavar="FILE", help="write it for pytorch.org/memory_viz")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `plan`."""
    add_arguments(parser, has_devices=True)
    _add_slices(parser)
    _add_offload(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="beside what people do: checkpointed layers, torch's own chooser, copies on the host (with --offload)",
    )
    _add_traces(parser)
    parser.add_argument("--no-largest-batch", action="store_true", help="do not look for it (spares a second trace)")
    add_mesh_arguments(parser)


def add_pareto_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pareto`."""
    add_arguments(parser)
    _add_offload(parser)
    parser.add_argument("--points", type=int, default=10, help="how many budgets (default 10)")
    parser.add_argument("--png", metavar="FILE", help="draw the frontier (needs the extra plot)")
    parser.add_argument("--svg", metavar="FILE", help="the same as SVG")


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the memory and the time of training; returns status 1 if it does not fit the device."""
    check_mesh_arguments(arguments)
    fields = _checked(arguments)
    with collector_paused(), _worker(arguments) as worker, _saying_what_is_done() as advance:
        from compile_remat.forecast.forecasting import forecast

        builder, target = _asked(arguments, fields)
        if arguments.mesh is not None:
            return run_mesh_table(arguments, builder, target, advance)
        if arguments.devices is not None:
            return run_device_table(arguments, builder, target, advance)
        found = forecast(
            builder,
            target,
            with_baselines=arguments.compare,
            with_max_batch=not arguments.no_largest_batch,
            worker=worker,
            with_plain=arguments.html is not None,
            advance=advance,
            known=partial(_show_part, arguments, advance),
        )
    if arguments.json:
        print(found.to_json())
    else:
        print(f"worked out in {found.seconds:.0f} s, without the device; times are the cost model's estimates")
    return 1 if found.fits is False else 0


def _show_part(arguments: argparse.Namespace, display: Display, found: Forecast) -> None:
    """Print the part of a forecast that has become known: the plan, with its files, then the baselines, then the largest batch."""
    with display.hidden():
        if found.largest_batch is not None:
            if not arguments.json:
                print(
                    f"largest batch  {_max_batch_text(found)}{', by rules' * (found.facts == 'observed')}", flush=True
                )
        elif found.compared:
            if not arguments.json:
                print_baselines(found)
        else:
            try:
                _write_files(found, arguments)
            finally:  # a full disk does not cost the plan
                if not arguments.json:
                    print_forecast(found)


def run_explain(arguments: argparse.Namespace) -> int:
    """Print the plan with the largest tensors at its peak."""
    fields = _checked(arguments)
    with _saying_what_is_done() as advance:
        from compile_remat.forecast.forecasting import forecast
        from compile_remat.report import floor_text

        asked = _asked(arguments, fields)
        found = forecast(*asked, with_max_batch=False, with_plain=arguments.html is not None, advance=advance)
    if arguments.json:
        print(json.dumps({**json.loads(found.plan.to_json()), "facts": found.facts, "why": found.why}, indent=1))
    else:
        print(found.plan)
        print(f"  lowest reachable peak {floor_text(found.floor_bytes, found.plan)}")
        print(f"  region peak     {format_bytes(found.peak_bytes)}, {found.facts_text}")
    _write_files(found, arguments)
    return 0


def run_pareto(arguments: argparse.Namespace) -> int:
    """Print plans from the fastest to the one of lowest peak."""
    fields = _checked(arguments)
    with _saying_what_is_done() as advance:
        from compile_remat.forecast.forecasting import forecast
        from compile_remat.forecast.frontier_forecast import forecast_frontier
        from compile_remat.pages.page import write_page
        from compile_remat.pages.plot import frontier_plot
        from compile_remat.passes.pictures.plan_pictures import marked

        builder, target = _asked(arguments, fields)
        found = None
        if arguments.html is not None:
            found = forecast(builder, target, with_max_batch=False, with_plain=True, advance=advance)
        seen = forecast_frontier(builder, target, arguments.points, advance)
    plans = [replace(point.plan, peak_bytes=point.peak_bytes) for point in seen.points]
    without = () if target.link is None else seen.kept
    if found is not None:
        figures = replace(found.figures(), frontier=marked(plans, found.plan, without))
        _written(arguments.html, partial(write_page, figures))
    for path in filter(None, (arguments.png, arguments.svg)):
        drawn = frontier_plot(marked(plans, None, without), plans[0].base, f"{arguments.model} on {arguments.device}")
        _written(path, partial(drawn.savefig, format="svg" if path == arguments.svg else "png", dpi=200))
    if arguments.json:
        print(
            json.dumps(
                [{**json.loads(plan.to_json()), "facts": seen.facts, "why": seen.why} for plan in plans], indent=1
            )
        )
        return 0
    titles, rows = _frontier_rows(plans)
    print_table(f"{arguments.model} on {arguments.device}", titles, rows)
    print(extra_time_text(plans[0]))
    print(f"region peaks: {seen.facts_text}")
    return 0


def _frontier_rows(plans: Sequence[Plan]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the titles and cells of a frontier; with columns about copies if any plan moves tensors to the host."""
    moves = any(plan.offloaded for plan in plans)
    titles = (
        "region peak",
        "step",
        "extra time",
        "lower bound",
        *("on the host", "copies prolong the step by") * moves,
    )
    rows = [
        (
            format_bytes(p.peak_bytes),
            format_time(p.time_ns),
            f"{p.extra_share:+.2%}",
            f"{p.bound_share:+.2%}",
            *(format_bytes(p.offloaded_bytes), format_time(p.stall_time_ns)) * moves,
        )
        for p in plans
    ]
    return titles, rows


@contextmanager
def _saying_what_is_done() -> Iterator[Display]:
    """Show progress on stderr, from before the import of torch on, which takes seconds, and nothing that torch says there."""
    with progress_bar("loading torch", None, seconds_between=0) as advance:
        advance()
        import torch  # noqa: F401

        with torch_is_quiet():
            yield advance


def _write_files(found: Forecast, arguments: argparse.Namespace) -> None:
    written = (
        (arguments.html, found.to_html),
        (arguments.chrome_trace, found.to_chrome_trace),
        (arguments.memory_snapshot, found.to_memory_snapshot),
    )
    for path, write in written:
        if path is not None:
            _written(path, write)


def _written(path: str, write: Callable[[str], object]) -> None:
    """Write a file; raises RematError if it cannot be written."""
    try:
        write(path)
    except OSError as error:
        raise RematError(f"{path} cannot be written ({error.strerror or error})") from None
    print(f"wrote {path}", file=sys.stderr)


def print_forecast(found: Forecast) -> None:
    """Print the tables of a forecast."""
    from compile_remat.report import floor_parts

    plan, sizes = found.plan, ", ".join(f"{name} {size}" for name, size in found.sizes.items())
    rows = [
        ("parameters", format_bytes(found.parameter_bytes)),
        (f"optimizer state ({found.optimizer})", format_bytes(found.optimizer_bytes)),
        ("inputs", format_bytes(found.input_bytes)),
        ("region peak", format_bytes(found.peak_bytes) + " (estimate)" * (found.facts == "estimated")),
        *_gradient_rows(found),
        *zip(("  lowest reachable peak", "    peak bound"), floor_parts(found.floor_bytes, plan), strict=False),
        *([("rows in slices", plan.slices_text)] if plan.sliced else []),
        *([("on the host", plan.offload_text)] if plan.offloaded else []),
        ("sum", format_bytes(found.total_bytes)),
        ("the step's peak is in", found.peak_moment),
    ]
    if found.limit_bytes is not None:
        rows.append(("capacity less the reserve", format_bytes(found.limit_bytes)))
        rows.append(("fits", "yes" if found.fits else "no"))
    rows += [
        (f"step, {plan.base.name}", format_time(plan.base.time_ns)),
        ("step, as planned", f"{format_time(plan.time_ns)} ({plan.extra_share:+.2%})"),
        ("lower bound of the extra time", f"{plan.bound_share:+.2%}"),
    ]
    print_table(f"{found.model} ({sizes}; {found.dtype}) on {found.device}", ("", ""), rows)
    print(f"region peak: {found.facts_text}")
    if found.message:
        print(f"note: {found.message}")
        drop_held(found.message)
    if found.time_note:
        print(f"times: {found.time_note}")
    print(extra_time_text(plan), flush=True)


def _gradient_rows(found: Forecast) -> list[tuple[str, str]]:
    return [(f"  {text}", size) for text, size in found.gradient_facts]


def print_baselines(found: Forecast) -> None:
    """Print the table of the baselines, with our plan within the peak of each."""
    from compile_remat.forecast.baselines import OF_LAYERS

    rows = [
        (c.name, format_bytes(c.peak_bytes), f"{c.extra_share:+.2%}", f"{c.ours.extra_share:+.2%}",
         f"{c.ours.bound_share:+.2%}", f"{c.advantage:+.2%}")
        for c in found.compared
    ]  # fmt: skip
    rows += [(name, "no layers", "", "", "", "") for name in OF_LAYERS if name not in {c.name for c in found.compared}]
    heads = ("baseline", "peak", "extra", "ours", "bound", "faster")
    by_rules = "; by rules" if found.facts == "observed" else ""
    print_table(f"what people do today, on the same timeline{by_rules}", heads, rows)
    print("extra: its extra time; ours: that of our plan within its peak;")
    print("bound: the lower bound for any plan within it; faster: ours before the baseline")
    best = max(found.compared, key=lambda c: c.advantage)
    worst = min(found.compared, key=lambda c: c.advantage)
    print(f"largest advantage {best.advantage:+.2%} ({best.name}), smallest {worst.advantage:+.2%} ({worst.name})")


def _max_batch_text(found: Forecast) -> str:
    largest = found.largest_batch
    if largest is None or largest.batch is None:
        return f"not known: {largest.why}" if largest is not None else ""
    if largest.plan is None or largest.total_bytes is None:
        return f"none: {largest.why}"
    found_text = f"{largest.batch} ({format_bytes(largest.total_bytes)}, {largest.plan.extra_share:+.2%})"
    return f"{found_text}: {largest.why}" if largest.why else found_text


def _checked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of the `Target`; imports no torch, so that a mistyped argument is answered at once.

    Raises:
        RematError: A model, a device or the value of an argument does not exist, or a file cannot be written.
    """
    from compile_remat.budget import MemoryBudget, OptimizerState, Reserve
    from compile_remat.config import parsed
    from compile_remat.cost_models import load_device
    from compile_remat.forecast.model_name import check_size, module_and_function

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `pkg.module` is imported from the current directory
    module_and_function(arguments.model)
    check_size("batch", arguments.batch)
    check_size("seq", arguments.seq)
    for name in [arguments.device] if getattr(arguments, "devices", None) is None else devices_of(arguments):
        load_device(name)
    for kind in _FILES:
        _check_folder(getattr(arguments, kind, None))
    return {
        "device": arguments.device or "",
        "budget": MemoryBudget.parse(arguments.budget),
        "optimizer": OptimizerState.parse(arguments.optimizer),
        "reserve": Reserve.parse(arguments.reserve),
        "time_limit": parsed("time_limit", arguments.time_limit, "--time-limit"),
        "gradients": arguments.gradients,
        "inputs": arguments.inputs,
        "estimate": arguments.estimate,
        "slices": parsed("slices", getattr(arguments, "slices", None) or "off", "--slices"),
        "offload": getattr(arguments, "offload", None) or "off",
        "host_bytes": parsed("capacity", getattr(arguments, "host_memory", None) or "none", "--host-memory"),
    }


def _asked(arguments: argparse.Namespace, fields: dict[str, Any]) -> tuple[Builder, Target]:
    from compile_remat.forecast.builders import Builder
    from compile_remat.forecast.target_step import Target

    return Builder(arguments.model, arguments.batch, arguments.seq, arguments.dtype), Target(**fields)


def _check_folder(path: str | None) -> None:
    """Raises RematError if a file cannot be made there, minutes before it would be written."""
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise RematError(f"{path} cannot be written (there is no folder {folder})")
    if os.path.isdir(path):
        raise RematError(f"{path} cannot be written (it is a folder)")
    if not os.access(folder, os.W_OK):
        raise RematError(f"{path} cannot be written (no permission to write in {folder})")


@contextmanager
def _worker(arguments: argparse.Namespace) -> Iterator[Worker | None]:
    """Start a second process that searches for the largest batch, and yield it; yields None if there is none.

    Both processes import torch at the same time.
    """
    is_asked = arguments.mesh is None and arguments.devices is None and not arguments.no_largest_batch
    if not is_asked or (os.cpu_count() or 1) == 1 or not _can_spawn():
        yield None
        return
    from compile_remat.forecast.second_process import started

    with started("compile_remat.forecast.forecasting") as worker:
        yield worker


def _can_spawn() -> bool:
    """Returns True if a second process can import the main module, which fails, for example, for a program from standard input."""
    main = sys.modules.get("__main__")
    return getattr(main, "__spec__", None) is not None or os.path.exists(getattr(main, "__file__", None) or "")
