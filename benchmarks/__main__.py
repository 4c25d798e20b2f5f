"""``python -m benchmarks``: every benchmark of docs/results/, one after the other, each in a process of its own.

    python -m benchmarks [promise step_time ...] [--device cuda] [--toy] [--json FOLDER]
    python -m benchmarks --markdown

`--markdown` writes the tables of README.md, docs/results.md and docs/results/ anew, from what is stored.
The exit status is 1 if any of them reported a miss.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = (
    "promise",
    "together",
    "max_speed",
    "step_time",
    "slices",
    "offload",
    "gap",
    "scale",
    "gpu",
)
APART = frozenset(
    {
        "conv_gradients", "cuda_codegen", "digest", "emitted", "first_step", "floor", "forecast_facts", "gpu_peaks", "gpu_prices",
        "inputs", "picture", "planning_time", "search_share", "stacks", "workspaces",
    }
)  # fmt: skip
"""Commands with options of their own, which `python -m benchmarks` does not call."""
IN_A_FOLDER = frozenset({"gpu"})
"""Benchmarks that write a folder instead of a file."""
FOR_GPUS = frozenset({"gpu"})
"""Benchmarks that run at toy size alone on a CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--toy", action="store_true", help="small models: is everything in its place?")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="where to write what was measured, a file each")
    parser.add_argument(
        "--markdown", action="store_true", help="run nothing, write the tables of the pages from the stored results"
    )
    arguments = parser.parse_args(argv)
    if arguments.markdown:
        from benchmarks.pages import blocks

        blocks.write()
        return 0
    unknown = sorted(set(arguments.names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(NAMES)}")
    if arguments.json is not None:
        arguments.json.mkdir(parents=True, exist_ok=True)
    names = arguments.names or [n for n in NAMES if n not in FOR_GPUS or arguments.device != "cpu" or arguments.toy]
    failed = [name for name in names if subprocess.run(_command(name, arguments)).returncode]
    if failed:
        print(f"\nnot as promised: {', '.join(failed)}")
    return int(bool(failed))


def _command(name: str, arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--device", arguments.device]
    if arguments.toy:
        command.append("--toy")
    if arguments.json is not None:
        place = arguments.json / f"{name}_{arguments.device}"
        command += ["--out", str(place)] if name in IN_A_FOLDER else ["--json", f"{place}.json"]
    return command


if __name__ == "__main__":
    sys.exit(main())
