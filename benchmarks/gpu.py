"""Memory against time on a GPU: plain torch.compile, checkpointed blocks, torch's own budgets, and ours at the same peaks.

    python -m benchmarks.gpu --model gpt --minutes 8 --out DIR [--device cuda] [--toy] [--option device=h200.json]
    python -m benchmarks.gpu --workers 14 --minutes 7 --share 0.25 --torch 0.5 --torch 0.1 --out DIR
    python -m benchmarks.gpu --quick --out DIR [--toy --device cpu] [--toy --device fake]

One model a call, in bfloat16; without `--model` all, one after the other, each with its own minutes. Every point starts from a
fresh state: nothing compiled, no memory held. The most telling points come first, and DIR/NAME.json is rewritten after each; a
second call goes on where the first one stopped. No point is begun that would, by the time of those before it, end too late. With
`--workers` the points of all models are compiled at once, in so many processes, and timed when all are compiled, each alone, in
two rounds. Where time is left, DIR/NAME.launches.json has each kernel of three steady steps of each point (step, name, ns, operator
and shapes, in their order) and the clocks before and behind, DIR/NAME.kernels.json the sums of a step by kernel. `--minutes` is
for all models then, and a second call starts anew. `--share` trains with a part of the batch, as these processes share the device.
At the end DIR/NAME.png shows the frontiers (matplotlib is an extra). Times are by CUDA events, peaks by `max_memory_allocated`
above the level before the step. `error` is of the prediction against the measured figure, `extra` the measured time beyond
plain's, and beside it the predicted one and its proven lower bound, as parts of the step. `gradients` is the relative difference
from plain's; eager mode draws other random numbers, so a model with dropout differs there. The exit status is 1 if a point failed
or falls short.
`--option compiler=eager` runs all graphs without compiling them.

`--quick` is for a few minutes of a GPU: everything in 8 minutes, in the order of its weight. It calibrates the device, and
plans by what it found; compiles GPT, Llama and ResNet-50 (plain, checkpointed, torch's 0.5, ours at the peaks of both, at the
former also with offload, and at `min`) beside each other and tunes each point's kernels alone; times each alone, A B A B;
records launches; compares the ResNet's gradients with float64's; and judges: a line for each asked figure, and exit status 1 if
one is missed. It begins nothing that would end too late, and says before it starts and at its end how many seconds of the
device it takes. DIR has at most 8 files, complete at any moment, which replace those of an earlier session: device.json,
NAME.json of each model, quick.json (parts and verdicts), launches.jsonl.gz (a line of JSON for each point, its sums by kernel
and its launches), frontiers.png and log.txt. `--toy --device cpu` runs all of it here, and `--device fake` emits the points'
code for a GPU that is not there (needs g++ and triton) and predicts their peaks.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.common.compile_caches import without_graph_caches
from benchmarks.contest import frontier, runs
from benchmarks.contest.frontier import Point
from benchmarks.contest.launches import Launch, sums
from benchmarks.contest.pool import Pool
from benchmarks.contest.runs import Contest, is_alive, tasks
from benchmarks.gpu_quick.session import FAKE, FAKE_PRICES, SHARE, Session
from benchmarks.models.large import LARGE

SAME_KIND, OTHER_KIND = 1.2, 1.5
"""The next point may take so much longer than the longest before it: of its kind, of any kind."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.quick:
        return Session(arguments, header(arguments)).run()
    if arguments.torch:
        runs.TORCH_BUDGETS = tuple(arguments.torch)
    if arguments.workers:
        return run_together(arguments.model or list(LARGE), arguments)
    with without_graph_caches():
        return max([run(name, arguments) for name in arguments.model or LARGE])


def run_together(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Compile the points of all models at once, and time each alone."""
    head = header(arguments) | {"workers": str(arguments.workers)}
    harness.print_header(head)
    arguments.out.mkdir(parents=True, exist_ok=True)
    fields = {
        "device": arguments.device,
        "scale": harness.scale_of(arguments),
        "seed": arguments.seed,
        "options": dict(arguments.option),
        "share": arguments.share,
        "is_apart": True,
    }

    def keep(name: str, points: Sequence[Point]) -> None:
        frontier.write(arguments.out / f"{name}.json", name, head, points)

    profiles: dict[str, dict[str, Sequence[Any]]] = {name: {} for name in names}

    def keep_launches(name: str, point: str, found: Sequence[Any]) -> None:
        profiles[name][point] = found
        write_profiles(arguments.out / name, profiles[name])

    with tempfile.TemporaryDirectory(prefix="remat-gpu-") as folder:
        pool = Pool(names, fields, Path(folder), arguments.workers, keep, keep_launches)
        told = pool.run(arguments.minutes)
    return max(conclude(name, arguments, head, pool.points(name), told) for name in names)


def write_profiles(path: Path, profiles: Mapping[str, Sequence[Any]]) -> None:
    """Write the launches of each point, and beside them the sums of a step by kernel."""
    kernels, texts = {}, []
    for point, (before, rows, after) in profiles.items():
        kernels[point] = sums([Launch(*row) for row in rows])
        lines = ",\n".join(json.dumps(row) for row in rows)
        clocks = f'"clocks_before": {json.dumps(before)}, "clocks_after": {json.dumps(after)}'
        texts.append(f'{json.dumps(point)}: {{{clocks},\n"launches": [\n{lines}]}}')
    path.with_suffix(".launches.json").write_text("{\n" + ",\n".join(texts) + "\n}\n")
    path.with_suffix(".kernels.json").write_text(json.dumps(kernels, indent=0) + "\n")


def run(name: str, arguments: argparse.Namespace) -> int:
    """Measure what is left of one model, as far as its time goes."""
    deadline = time.monotonic() + 60 * arguments.minutes
    head = header(arguments)
    path = arguments.out / f"{name}.json"
    points = frontier.read(path, head)
    if arguments.retry:
        points = [point for point in points if point.failure is None]
    one = Contest(
        name,
        arguments.device,
        harness.scale_of(arguments),
        arguments.seed,
        dict(arguments.option),
        path.with_suffix(".gradients.pt"),
        arguments.share,
    )
    harness.print_header(head)
    print(f"{name}: {LARGE[name].__doc__} ({len(points)} points from before; sizes in MiB)", flush=True)
    told = measure(one, points, deadline, lambda: frontier.write(path, name, head, points))
    return conclude(name, arguments, head, points, told)


def conclude(name: str, arguments: argparse.Namespace, head: dict[str, str], points: Sequence[Point], told: str) -> int:
    """Print what the points of a model show, draw them, and return the command's exit status."""
    is_timed = torch.device(arguments.device).type == "cuda" and not arguments.toy
    print(f"\n{name}: {LARGE[name].__doc__}\n\n" + frontier.table(points, is_timed=is_timed) + "\n")
    print("\n".join(frontier.quartiles(points)) + "\n")
    lines, missed = frontier.summary(points, is_timed=is_timed)
    print("\n".join([*lines, told]))
    if not frontier.draw((arguments.out / name).with_suffix(".png"), head, {name: points}):
        print("no picture: matplotlib is not installed, or nothing was measured")
    return int(bool(missed))


def measure(one: Contest, points: list[Point], deadline: float, keep: Callable[[], None]) -> str:
    """Append to `points` until nothing is left or the time is up; says which. `keep` is called after each."""
    while (task := next(tasks(points), None)) is not None:
        expected_s = estimate_s(task.kind, points)
        left_s = deadline - time.monotonic()
        if points and expected_s > left_s:  # the first point has no estimate
            times = f"{expected_s:.0f} s, {max(0.0, left_s):.0f} s are left"
            return f"stopped: the next point ({task.kind} {task.setting}) may take {times}; run it again to go on"
        harness.progress(f"{one.name}: {task.kind} {task.setting}, {left_s:.0f} s left")
        point = one.take(task)
        points.append(point)
        keep()
        harness.progress("  " + "  ".join(frontier.cells(point, points, is_timed=False)))
        if point.failure is not None and not is_alive(one.device):
            return f"stopped: {one.device} does not answer any more after that failure; run it again to go on"
    return "finished: every point is measured"


def estimate_s(kind: str, points: Sequence[Point]) -> float:
    """Upper estimate of the next point's seconds from the points before it; 0 before the first point."""
    same = [point.wall_s for point in points if point.kind == kind]
    if same:
        return SAME_KIND * max(same)
    return OTHER_KIND * max((point.wall_s for point in points), default=0.0)


def header(arguments: argparse.Namespace) -> dict[str, str]:
    """Device, versions, size and options; the points of a file agree in `frontier.FIGURES_OF_PLACE`."""
    size = "toy" if arguments.toy else "full"
    options = " ".join(f"{name}={value}" for name, value in sorted(arguments.option)) or "none"
    size += f", {arguments.share:g} of the batch" if arguments.share != 1 else ""
    versions = {"cuda": str(torch.version.cuda), "size": f"{size}, bfloat16, seed {arguments.seed}", "options": options}
    if arguments.device == FAKE:
        return harness.header("cpu") | versions | {"device": f"fake, priced as the table's {FAKE_PRICES}"}
    return harness.header(arguments.device) | versions


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="all that a few minutes of a GPU are for, see above")
    parser.add_argument("--model", action="append", choices=list(LARGE), help="may be repeated; default all")
    parser.add_argument("--minutes", type=float, default=8.0, help="for each model (default 8); with --quick for all")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="DIR", help="default build/gpu")
    parser.add_argument("--device", default="cuda", help="cuda (default); with --toy cpu; with --quick fake")
    parser.add_argument("--toy", action="store_true", help="tiny models: checks the command, not the claims")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="compile in so many processes at once, then time; --quick: all cores but one",
    )
    parser.add_argument("--share", type=float, help="part of the batch (default 1; with --quick 0.25 at full size)")
    parser.add_argument("--torch", type=float, action="append", help="only these of torch's budgets; may be repeated")
    parser.add_argument("--retry", action="store_true", help="measure once more what failed before")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="of our backend; may be repeated",
    )
    arguments = parser.parse_args(argv)
    if arguments.quick and (arguments.torch or arguments.retry):
        parser.error("--quick has points of its own: no --torch and no --retry")
    if arguments.share is None:
        arguments.share = SHARE if arguments.quick and not arguments.toy else 1.0
    is_fake = arguments.quick and arguments.device == FAKE
    if not is_fake and torch.device(arguments.device).type != "cuda" and not arguments.toy:
        parser.error("these models take tens of GiB: without a GPU, say --toy")
    if not is_fake and torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here: see compile-remat doctor")
    return arguments


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
