"""What a mask of dropout costs, by what becomes of it: CPU time of the kernels that make it and of those that read it again.

    python -m benchmarks.narrowing_time [--rounds 25] [--toy]

Three ways to have a mask in the backward: draw it again, save it as bytes, save it as bits.  `forward` draws the mask and applies
GELU and the mask, and saves what the way saves; `backward` multiplies a gradient with the mask.  The bits are made and read by the
operators of `narrow="auto"`.  One thread, interleaved; the clock is the process's CPU time.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from compile_remat._torch.narrowing.bit_ops import packed_bits, unpacked_bits

RATE = 0.1
SHAPE, TOY_SHAPE = (2048, 1024), (64, 64)
ORDER = (0, 1)


def draw(x: Tensor) -> Tensor:
    return torch.rand_like(x) > RATE


def apply(x: Tensor, mask: Tensor) -> Tensor:
    return F.gelu(x) * mask / (1 - RATE)


def forward_alone(x: Tensor) -> Tensor:
    return apply(x, draw(x))


def forward_with_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    mask = draw(x)
    return apply(x, mask), mask


def forward_with_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    bits = packed_bits(draw(x), ORDER)
    return apply(x, unpacked_bits(bits, x.shape, ORDER)), bits


def backward_drawn(gradient: Tensor) -> Tensor:
    return gradient * draw(gradient)


def backward_from_bits(gradient: Tensor, bits: Tensor) -> Tensor:
    return gradient * unpacked_bits(bits, gradient.shape, ORDER)


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("what a mask of dropout costs")
    parser.add_argument("--rounds", type=int, default=25, help="of all kernels (default 25)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    harness.print_header(harness.header(arguments.device))
    with private_compile_caches(), torch.no_grad():
        print(harness.ascii_table(*table(measured(arguments))))
    return 0


def measured(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Milliseconds of `forward` and `backward`, medians, by what becomes of the mask."""
    x = torch.randn(TOY_SHAPE if arguments.toy else SHAPE, device=arguments.device)
    _, mask = (with_bytes := torch.compile(forward_with_bytes))(x)
    _, bits = (with_bits := torch.compile(forward_with_bits))(x)
    alone, drawn, read_bits = (torch.compile(f) for f in (forward_alone, backward_drawn, backward_from_bits))
    read_bytes = torch.compile(torch.mul)
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("drawn again", "forward"): lambda: alone(x),
        ("drawn again", "backward"): lambda: drawn(x),
        ("saved as bytes", "forward"): lambda: with_bytes(x),
        ("saved as bytes", "backward"): lambda: read_bytes(x, mask),
        ("saved as bits", "forward"): lambda: with_bits(x),
        ("saved as bits", "backward"): lambda: read_bits(x, bits),
    }
    times: dict[tuple[str, str], list[int]] = {key: [] for key in runs}
    for k in range(arguments.rounds + 1):  # the first round compiles
        for key, run in runs.items():
            start = time.process_time_ns()
            run()
            times[key] += [time.process_time_ns() - start] if k else []
    found: dict[str, dict[str, float]] = {}
    for (way, part), all_ns in times.items():
        found.setdefault(way, {})[part] = statistics.median(all_ns) / 1e6
    return found


def table(rows: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    cells = [
        [way, f"{ms['forward']:.1f}", f"{ms['backward']:.1f}", f"{sum(ms.values()):.1f}"] for way, ms in rows.items()
    ]
    return ["the mask", "forward ms", "backward ms", "together ms"], cells


if __name__ == "__main__":
    sys.exit(main())
