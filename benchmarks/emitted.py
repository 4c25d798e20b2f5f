"""Kernels and bytes moved of the Triton code for one H200, of a large model at full size, on a machine without a GPU.

    python -m benchmarks.emitted [--model gpt] [--budget BYTES] [--no-guard] [--slices auto] [--offload auto] [--scale 0.1]
                                 [--json OUT] [--show]

A batch of a quarter of `benchmarks.gpu`'s, bfloat16, 16 blocks; the code is generated and its wrapper run dry, and no kernel runs.
Without `--budget` the settings are ``plain``, torch's partitioner at its ``activation_memory_budget`` of 0.5, and ours at two peaks
that were measured on an H200: that of torch at 0.5 and that of checkpointed blocks.  `--budget` may be bytes, ``min``, ``max``,
``plain`` or ``torch R``.  `--no-guard` lets Inductor fuse what it likes: the same plan without the fusion guard.

A kernel is a node of Inductor's final scheduler that launches something.  "moved" are the bytes that Inductor's own kernels read
and write, each buffer of a kernel once; `--families` lists them by the operator of the model that most nodes of a kernel come
from.  "refused" are fusions that Inductor would make and the guard does not, once for each time that Inductor asks.  Rows are
stored in OUT one by one, and those that are there are not made again.  A row takes 1 to 4 minutes and 4 GiB.  Needs g++ and the
package `triton`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import harness
from benchmarks.common.harness import mib

DEVICE = Path(__file__).parent / "results" / "gpu_h200" / "device.json"
SETTINGS = {
    "gpt": ("plain", "torch 0.5", "7222132736", "3275610112"),
    "gpt_head": ("plain", "min"),
    "llama": ("plain", "torch 0.5", "5744929792", "2349029376"),
}
HOST_MEMORY = "4GiB"
TITLES = (
    "model",
    "setting",
    "guard",
    "products",
    "attentions",
    "other",
    "fused",
    "moved GiB",
    "refused",
    "peak MiB",
    "predicted",
)


@dataclass(frozen=True)
class EmittedRow:
    """One setting of one model.

    Attributes:
        products, attentions, other, fused: Numbers of kernels: of matmuls and convolutions, of attention, of other operators of
            libraries, and of Inductor's own kernels.
        families: Number of fused kernels and bytes that they move, by operator.
        refused: Numbers of refused fusions by reason, for ``forward`` and ``backward``.
        peak_bytes: Peak of the emitted code in a dry run of forward and backward.
        slices: The setting.
        time_ns: Estimated time of forward and backward under the plan.
        sliced: The products whose rows the plan computes in slices.
        offload: The setting.
        offloaded_bytes: Bytes that wait on the host.
        stall_ns: Estimated time by which copies prolong the step, part of `time_ns`.
    """

    model: str
    setting: str
    guarded: bool = True
    scale: float = 1.0
    products: int = 0
    attentions: int = 0
    other: int = 0
    fused: int = 0
    families: Mapping[str, tuple[int, int]] | None = None
    refused: Mapping[str, Mapping[str, int]] | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    extra_time_ns: int | None = None
    slices: str = "off"
    time_ns: int | None = None
    sliced: str = ""
    offload: str = "off"
    offloaded_bytes: int = 0
    stall_ns: int = 0
    failure: str | None = None

    @property
    def key(self) -> tuple[str, str, bool, float, str, str]:
        """The setting of the row."""
        return self.model, self.setting, self.guarded, self.scale, self.slices, self.offload

    @property
    def host_settings(self) -> dict[str, str]:
        """Settings of offload, with the same host memory on every machine."""
        return {} if self.offload == "off" else {"offload": self.offload, "host_memory": HOST_MEMORY}

    @property
    def budget_bytes(self) -> int | None:
        """The budget, if the setting is one in bytes."""
        return int(self.setting) if self.setting.isdecimal() else None

    @property
    def moved_bytes(self) -> int:
        """Bytes that all fused kernels move."""
        return sum(nbytes for _, nbytes in (self.families or {}).values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser_of_stored_rows(__doc__, SETTINGS)
    parser.add_argument("--budget", action="append", help="may be repeated; default: see above")
    parser.add_argument("--no-guard", action="store_true", help="let Inductor fuse what it likes")
    parser.add_argument("--scale", type=float, default=1.0, help="scale of all sizes; default 1")
    parser.add_argument("--slices", default="off", help="the setting of our plans; default off")
    parser.add_argument("--offload", default="off", help=f"with {HOST_MEMORY} of host memory; default off")
    parser.add_argument("--families", action="store_true", help="list bytes by family, and refused fusions")
    arguments = parser.parse_args(argv)
    versions = "" if arguments.show else f"{version('torch')}, triton {version('triton')}"
    head = harness.header("cpu") | {"device": "fake, priced as the H200 of results/gpu_h200", "torch": versions}
    head, rows = harness.stored_rows(arguments.json, head, lambda fields: EmittedRow(**fields))
    if not arguments.show:
        for model in arguments.model or SETTINGS:
            for setting in arguments.budget or SETTINGS[model]:
                options = {"slices": arguments.slices, "offload": arguments.offload}
                blank = EmittedRow(model, setting, not arguments.no_guard, arguments.scale, **options)
                if all(row.key != blank.key for row in rows):
                    harness.progress(f"{model}, {setting}")
                    command = ["benchmarks.common.fake_cuda.emitted_row", json.dumps(asdict(blank)), str(DEVICE)]
                    rows += [EmittedRow(**fields) for fields in harness.rows_of_process(command)]
                    harness.write_json(arguments.json, head, rows)
    harness.print_header(head)
    print(harness.ascii_table(*table(rows)))
    if arguments.families:
        print(*map(_details, rows), sep="\n")
    return int(any(row.failure for row in rows))


def table(rows: Sequence[EmittedRow]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Titles, and a line for each row."""
    return TITLES, [_cells(row) for row in rows]


def _cells(row: EmittedRow) -> tuple[str, ...]:
    given = row.setting if row.budget_bytes is None else f"{mib(row.budget_bytes)} MiB"
    if row.failure:
        return (row.model, given, *["-"] * (len(TITLES) - 3), row.failure)
    refused = sum(sum(reasons.values()) for reasons in (row.refused or {}).values())
    counts = map(str, (row.products, row.attentions, row.other, row.fused))
    moved = f"{row.moved_bytes / 2**30:.2f}"
    peaks = mib(row.peak_bytes), mib(row.predicted_peak_bytes)
    given += f", {row.sliced}" if row.sliced else f", slices {row.slices}" if row.slices != "off" else ""
    given += f", {mib(row.offloaded_bytes)} MiB on the host" if row.offloaded_bytes else ""
    return (row.model, given, "on" if row.guarded else "off", *counts, moved, str(refused), *peaks)


def _details(row: EmittedRow) -> str:
    families = [
        (family, str(count), f"{nbytes / 2**30:.2f}") for family, (count, nbytes) in (row.families or {}).items()
    ]
    refused = [
        f"{graph}: {count} x {why}" for graph, each in (row.refused or {}).items() for why, count in each.items()
    ]
    title = f"\n{row.model} {row.setting}{'' if row.guarded else ', without the guard'}"
    return "\n".join([title, harness.ascii_table(("family", "kernels", "GiB"), families), *refused])


if __name__ == "__main__":
    sys.exit(main())
