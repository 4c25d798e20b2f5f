"""Saved values in fewer bits: the time that a budget costs with narrow="auto" and with "off", and whether gradients are equal.

    python -m benchmarks.narrowing [--case bert] [--fraction 0.4] [--rounds 20] [--toy] [--json OUT]

Each case is trained without a budget (`max`), and inside a part of plain torch.compile's peak with both settings.  The steps of
all three are interleaved; extra time is what a budget adds to the step of `max`.  extra: its ratio, auto over off, measured, with
the 95 % bootstrap interval of the ratio of medians.  On a CPU the clock is the process's CPU time, with one thread, so that other
processes hardly count.  estimated: the same of the plans.  equal: whether every gradient of the first
step has the same bits.  ok: both peaks are within the budget, gradients are equal, and the measured ratio is at most 0.9.  The exit
status is 1 on any miss.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import compile_remat
from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.harness import MIB, mib
from benchmarks.common.timing import step_times_ns
from benchmarks.models import Case, transformers
from benchmarks.models.building import scaled

EXTRA_LIMIT = 0.9
RESAMPLES = 2000
SETTINGS = ("max", "off", "auto")


class Gpt(nn.Module):
    """Language model of causal blocks with dropout 0.1, the loss inside."""

    def __init__(self, depth: int, width: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(tokens, width) * 0.02)
        blocks = (transformers.Block(width, 4, causal=True, dropout=0.1) for _ in range(depth))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[B, T], [B, T] -> scalar loss"""
        x = F.dropout(self.token(tokens) + self.position, 0.1, self.training)
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


class Attention(nn.Module):
    """Attention that writes its probabilities out, with dropout 0.1 on them and a mask of padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        """[B, T, D], [B, T] -> [B, T, D]"""
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2) * (d // 4) ** -0.5).masked_fill(padded[:, None, None], -1e9)
        weights = F.dropout(scores.softmax(-1), 0.1, self.training)
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


class Attentions(nn.Module):
    """Layers of such attention."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width) for _ in range(depth))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """[B, T, D], [B, T] -> scalar loss"""
        for layer in self.layers:
            x = layer(x, tokens == 0)
        return x.square().mean()


def build(name: str, scale: float, seed: int) -> Case:
    """A case with weights and inputs drawn from `seed`."""
    torch.manual_seed(seed)
    if name == "bert":
        return Case(name, *transformers.bert(scale), "")
    depth, width = scaled(6, scale, least=2), scaled(256, scale, step=64, least=64)
    batch, tokens, vocabulary = 8, scaled(128, scale, least=32), scaled(4096, scale)
    if name == "gpt":
        ids = torch.randint(vocabulary, (2, batch, tokens))
        return Case(name, Gpt(depth, width, tokens, vocabulary), (ids[0], ids[1]), "")
    if name == "attention":
        tokens, width = scaled(256, scale, least=64), 128
        return Case(
            name, Attentions(4, width), (torch.randn(batch, tokens, width), torch.randint(9, (batch, tokens))), ""
        )
    channels = scaled(16, scale, least=8)
    layers: list[nn.Module] = []
    for source, target in ((3, channels), (channels, 2 * channels), (2 * channels, 4 * channels)):
        layers += [
            nn.Conv2d(source, target, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(target, target, 3, padding=1),
            nn.ReLU(),
        ]
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, 10)]
    return Case(name, nn.Sequential(*layers), (torch.randn(scaled(32, scale, least=4), 3, 64, 64),), "")


CASES = ("bert", "gpt", "attention", "vgg")


@dataclass(frozen=True)
class NarrowingRow:
    """One case inside one budget: measured peaks in bytes, medians of step times, both ratios of extra time.

    Attributes:
        num_narrow: Tensors that are saved in a narrow form.
        estimated: Extra time of the plan with narrow forms over that without, both over `max`.
    """

    case: str
    fraction: float
    plain_peak_bytes: int
    budget_bytes: int
    off_peak_bytes: int
    auto_peak_bytes: int
    num_narrow: int
    max_ns: int
    off_ns: int
    auto_ns: int
    extra: float
    extra_low: float
    extra_high: float
    estimated: float
    is_equal: bool
    rounds: int

    @property
    def verdict(self) -> str:
        reasons = []
        if max(self.off_peak_bytes, self.auto_peak_bytes) > self.budget_bytes:
            reasons.append("above the budget")
        if not self.is_equal:
            reasons.append("gradients differ")
        if self.extra > EXTRA_LIMIT:
            reasons.append(f"extra time above {EXTRA_LIMIT}")
        return "miss: " + "; ".join(reasons) if reasons else "ok"


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("saved values in fewer bits")
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default all")
    parser.add_argument("--fraction", action="append", type=float, help="of plain's peak; may be repeated; default 0.4")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds of the three steps (default 20)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    head = harness.header(arguments.device)
    harness.print_header(head)
    rows: list[NarrowingRow] = []
    with private_compile_caches():
        for name in arguments.case or CASES:
            for fraction in arguments.fraction or (0.4,):
                rows.append(row_of(name, fraction, arguments))
                harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)))
    return int(any(row.verdict != "ok" for row in rows))


def row_of(name: str, fraction: float, arguments: argparse.Namespace) -> NarrowingRow:
    """Measure one case inside one budget."""
    torch.compiler.reset()
    device, scale = arguments.device, harness.scale_of(arguments)

    def case() -> Case:
        made = build(name, scale, arguments.seed)
        return Case(name, made.module.to(device), tuple(x.to(device) for x in made.inputs), "")

    harness.progress(f"{name}: plain torch.compile, then {fraction} of its peak")
    plain = harness.plain(case())
    plain.clear_and_step()
    plain_bytes = harness.second_step_peak(plain, device).peak_bytes
    budget_bytes = max(MIB, int(fraction * plain_bytes))
    runs, peaks, extra_ns, gradients, num_narrow = {}, {}, {}, {}, 0
    for setting in SETTINGS:
        compile_remat.reset_reports()
        options = {"narrow": setting} if setting != "max" else {}
        runs[setting] = run = harness.remat(case(), budget_bytes if options else "max", **options)
        torch.manual_seed(arguments.seed)
        run.clear_and_step()
        gradients[setting] = [p.grad.clone() for p in run.module.parameters() if p.grad is not None]
        plan = compile_remat.reports()[-1].plan
        assert plan is not None
        extra_ns[setting], num_narrow = plan.extra_time_ns, len(plan.narrowed)
        peaks[setting] = harness.second_step_peak(run, device).peak_bytes
    times = _times({s: run.clear_and_step for s, run in runs.items()}, arguments.rounds, device, arguments.seed)
    draw = np.random.default_rng(arguments.seed)
    picks = draw.integers(arguments.rounds, size=(RESAMPLES, arguments.rounds))
    low, high = np.percentile([_extra(times[:, pick]) for pick in picks], (2.5, 97.5))
    medians = np.median(times, axis=1).astype(int).tolist()
    return NarrowingRow(
        name,
        fraction,
        plain_bytes,
        budget_bytes,
        peaks["off"],
        peaks["auto"],
        num_narrow,
        *medians,
        _extra(times),
        float(low),
        float(high),
        (extra_ns["auto"] - extra_ns["max"]) / max(1, extra_ns["off"] - extra_ns["max"]),
        all(torch.equal(a, b) for a, b in zip(gradients["off"], gradients["auto"], strict=True)),
        arguments.rounds,
    )


def _times(steps: dict[str, Callable[[], object]], rounds: int, device: str, seed: int) -> "np.ndarray":
    """Nanoseconds of each step in each round, [steps, rounds]; the order inside of a round is drawn."""
    clock = time.process_time_ns if device == "cpu" else time.perf_counter_ns
    names, draw = list(steps), np.random.default_rng(seed)
    times = np.zeros((len(names), rounds))
    for step in steps.values():
        step()
    for k in range(rounds):
        for which in draw.permutation(len(names)):
            times[which, k] = step_times_ns(steps[names[which]], 1, device, clock)[0]
    return times


def _extra(times: "np.ndarray") -> float:
    """The last step's extra time over the first, in parts of the second's; medians over rounds."""
    base, off, auto = np.median(times, axis=1)
    return float((auto - base) / max(1.0, off - base))


def table(rows: Sequence[NarrowingRow]) -> tuple[list[str], list[list[str]]]:
    titles = ["case", "of plain", "plain MiB", "off MiB", "auto MiB", "narrow", "max ms", "off ms", "auto ms"]
    titles += ["extra, auto / off", "estimated", "equal", "verdict"]
    cells = [
        [
            row.case,
            f"{row.fraction:g}",
            mib(row.plain_peak_bytes),
            mib(row.off_peak_bytes),
            mib(row.auto_peak_bytes),
            str(row.num_narrow),
            harness.ms(row.max_ns),
            harness.ms(row.off_ns),
            harness.ms(row.auto_ns),
            f"{row.extra:.2f} [{row.extra_low:.2f}, {row.extra_high:.2f}]",
            f"{row.estimated:.2f}",
            "yes" if row.is_equal else "no",
            row.verdict,
        ]
        for row in rows
    ]
    return titles, cells


if __name__ == "__main__":
    sys.exit(main())
