"""Saved tensors in host memory on a GPU: rates of the link, gradients equal to the bit, the share of the copies, their order.

    python -m benchmarks.gpu_offload --device cuda --out DIR [--toy] [--steps 200] [--model gpt]

Takes about 150 s of an H200 (an estimate: none has run it), and writes DIR/offload.json after each part.

- "link": bytes per second to the host and back, alone, both at once and beside products (`compile-remat calibrate` has the same).
- "gradients": GPT and Llama at half of their sizes, under a plan for 0.6 of plain's peak, and under the same plan with all its
  saved tensors on the host.  Each of `--steps` steps has tokens of its own, and the gradients of both must be equal to the bit;
  then once more with `SPIN_MS` of idle work before each mark of the kernels, before each copy to the host, and before each copy
  back.  Algorithms are torch's deterministic ones, with CUBLAS_WORKSPACE_CONFIG=:4096:8, and Inductor rounds where eager mode does
  (``emulate_precision_casts``): else a kernel reads its own bfloat16 result as it was before rounding, and kernels may be fused
  otherwise around copies.
- "copies": the time of a step of both plans, the part of it in which each copy engine works, and the most pinned memory.
- "order": `python -m tests.races.on_device`: the real order of events, waits and memory beside that of the emitted code.

`--toy --device cpu` runs all but the last here; copies are threads then.  Exit status 1 if something differs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch._inductor import config as inductor_config

import compile_remat
from benchmarks.common import harness
from benchmarks.common.timing import step_times_ns
from benchmarks.contest import launches
from benchmarks.models.large import build_large
from compile_remat._torch.offload.host_memory import MAPPED
from compile_remat._torch.offload.streams import Direction, ThreadStreams, streams_of, streams_replaced
from compile_remat._util.atomic_write import write_atomically
from compile_remat.backend import remat
from compile_remat.cost_models.timing.host_link import measured_link

MODELS = ("gpt", "llama")
SCALE, BUDGET = 0.5, 0.6
SPIN_MS = 2.0
CYCLES_PER_MS = 1_980_000
"""Of an H200 at its boost clock."""
TIMED = 10
ORDER_S = 240.0
"""The most seconds of the last part."""

Step = Callable[..., torch.Tensor]


class Pair:
    """One model under a plan that keeps all saved tensors on the device, and under the same plan with all of them on the host.

    Attributes:
        kept, away: The model, compiled under either plan.
        moved: The number of tensors that wait on the host.
    """

    def __init__(self, name: str, device: torch.device, scale: float, folder: Path) -> None:
        case = build_large(name, device=device, scale=scale)
        self.module: Any = case.module
        self.like, self.tokens = case.inputs[0], case.inputs
        self.kept = self._compiled(folder / "kept")
        self.step(self.kept)
        (path,) = (folder / "kept").glob("*.plan.json")
        plan = json.loads(path.read_text())
        places = [{"name": saved, "release_before": "", "fetch_before": ""} for saved in plan["saved"]]
        (folder / "away").mkdir()
        (folder / "away" / path.name).write_text(json.dumps({**plan, "offloaded": places}))
        self.away, self.moved = self._compiled(folder / "away"), len(places)
        self.step(self.away)

    def _compiled(self, folder: Path) -> Step:
        options = compile_remat.options(memory_budget=BUDGET, plan_dir=str(folder))
        compiled: Any = torch.compile(self.module, backend=remat, options=options)
        return compiled  # type: ignore[no-any-return]

    def draw(self, seed: int) -> None:
        """Take other tokens from now on."""
        torch.manual_seed(seed)
        size = self.module.embed.num_embeddings
        self.tokens = tuple(torch.randint(size, self.like.shape, device=self.like.device) for _ in range(2))

    def step(self, call: Step) -> None:
        """A forward and its backward."""
        self.module.zero_grad()
        call(*self.tokens).backward()

    def gradients(self, call: Step) -> list[torch.Tensor]:
        """The gradients of a step."""
        self.step(call)
        return [parameter.grad for parameter in self.module.parameters()]

    def differing(self, steps: int) -> int:
        """The number of steps whose gradients are not equal to the bit."""
        found = 0
        for seed in range(steps):
            self.draw(seed)
            kept = self.gradients(self.kept)
            found += not all(map(torch.equal, kept, self.gradients(self.away)))
        return found


class Spinning:
    """Streams of which one idles for `SPIN_MS` before it does what offload asks for.

    Args:
        slow: The engine that idles; None for the kernels.
    """

    def __init__(self, device: torch.device, slow: Direction | None) -> None:
        self._slow, self._inner = slow, streams_of(device) if device.type == "cuda" else ThreadStreams()
        if isinstance(self._inner, ThreadStreams) and slow is not None:
            self._inner.engine(device, slow).before_copy = _sleep

    def current(self, device: torch.device) -> Any:
        """See `Streams.current`; the kernels idle at once."""
        if self._slow is None:
            _spin(device)
        return self._inner.current(device)

    def engine(self, device: torch.device, direction: Direction) -> Any:
        """See `Streams.engine`."""
        engine: Any = self._inner.engine(device, direction)
        if direction is self._slow and device.type == "cuda":
            with torch.cuda.stream(engine._stream):
                _spin(device)
        return engine

    def empty_host(self, like: torch.Tensor) -> torch.Tensor:
        """See `Streams.empty_host`."""
        return self._inner.empty_host(like)


def _spin(device: torch.device) -> None:
    torch.cuda._sleep(int(SPIN_MS * CYCLES_PER_MS)) if device.type == "cuda" else _sleep()


def _sleep() -> None:
    time.sleep(SPIN_MS / 1000)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = harness.parser("saved tensors on the host: rates, gradients, times, order")
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; default all")
    parser.add_argument("--steps", type=int, default=200, help="with gradients compared, for each stream; default 200")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args(argv)
    device, scale = torch.device(arguments.device), 0.02 if arguments.toy else SCALE
    torch.use_deterministic_algorithms(True)
    inductor_config.emulate_precision_casts = True
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write where a copy may read
    head = harness.header(arguments.device)
    harness.print_header(head)
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines, start = list[dict[str, Any]](), time.monotonic()
    parts = [lambda: _link(device, is_toy=arguments.toy)]
    parts += [lambda name=name: _pair(name, device, scale, arguments.steps) for name in arguments.model or MODELS]
    parts += [_order] if device.type == "cuda" else []
    for part in parts:
        for line in part():
            lines.append(line)
            print(f"{'ok' if line['is_met'] else 'MISS':4}  {line['text']}", flush=True)
            seconds = round(time.monotonic() - start, 1)
            document = {"header": head, "seconds": seconds, "lines": lines}
            write_atomically(arguments.out / "offload.json", json.dumps(document, indent=1) + "\n")
    print(f"took {time.monotonic() - start:.0f} s of the device")
    return int(not all(line["is_met"] for line in lines))


def _line(text: str, *, is_met: bool = True, **figures: object) -> dict[str, Any]:
    return {"text": text, "is_met": is_met, **figures}


def _link(device: torch.device, *, is_toy: bool) -> Iterator[dict[str, Any]]:
    found = measured_link(device, is_toy=is_toy)
    yield _line(f"link: {found}", **found.figures())


def _pair(name: str, device: torch.device, scale: float, steps: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="remat-offload-") as folder:
        pair = Pair(name, device, scale, Path(folder))
    for label, streams in _spinning(device):
        with streams:
            differ = pair.differing(steps)
        text = f"gradients: {name}, {pair.moved} tensors on the host, {label}: {differ} of {steps} steps differ"
        yield _line(text, is_met=not differ, model=name, differ=differ, steps=steps)
    yield _copies(name, pair, device)


def _spinning(device: torch.device) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    yield "no stream idles", nullcontext()
    for slow, label in ((None, "kernels idle"), *((each, f"copies {each} idle") for each in Direction)):
        yield f"{label} for {SPIN_MS:g} ms", streams_replaced(device.type, Spinning(device, slow))


def _copies(name: str, pair: Pair, device: torch.device) -> dict[str, Any]:
    """Times of both plans, the part of a step in which engines copy, and the most host memory."""
    kept_ns, away_ns = (
        statistics.median(step_times_ns(lambda call=call: pair.step(call), TIMED, device))  # type: ignore[misc]
        for call in (pair.kept, pair.away)
    )
    text = f"copies: {name}: a step of {kept_ns / 1e6:.2f} ms takes {away_ns / 1e6:.2f} with the copies"
    if device.type != "cuda":
        return _line(f"{text}; {harness.mib(MAPPED.peak_bytes)} MiB of the host at most", model=name)
    sums = launches.sums(launches.recorded(lambda: pair.step(pair.away), str(device)))
    shares = [sum(ns for kernel, ns, _ in sums if kind in kernel) / away_ns for kind in ("DtoH", "HtoD")]
    host_bytes = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    text += f", in which the engines copy for {shares[0]:.0%} and {shares[1]:.0%}"
    return _line(f"{text}; {harness.mib(host_bytes)} MiB of pinned memory at most", model=name)


def _order() -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.races.on_device"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ORDER_S, check=False)
    rows = [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]
    equal, races = sum(row["is_equal"] for row in rows), sum(bool(row["races"]) for row in rows)
    text = f"order: {equal} of {len(rows)} steps have the order of their code, {races} have a race"
    yield _line(text, is_met=not done.returncode and bool(rows), rows=rows, errors=done.stderr[-2000:])


if __name__ == "__main__":
    sys.exit(main())
