"""`compile-remat demo`: one training job three times, with plain torch.compile and inside two byte budgets."""

import argparse
import re

SIZES = (
    ("--layers", 12, "blocks of the GPT (default 12)"),
    ("--width", 192, "width of the model (default 192)"),
    ("--heads", 4, "heads, a divisor of the width (default 4)"),
    ("--context", 128, "bytes of context (default 128)"),
    ("--batch", 8, "sequences in a step (default 8)"),
    ("--steps", 40, "training steps of each run (default 40)"),
    ("--max-bytes", 4 << 20, "how much text to read (default 4 MiB)"),
)
BUDGETS = "fractions of the plain run's measured peak, or sizes such as 90MiB (default 0.5,0.3)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the demo; imports nothing heavy."""
    for flag, default, text in SIZES:
        parser.add_argument(flag, type=_positive, default=default, help=text)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--budgets", type=_budgets, default=(0.5, 0.3), metavar="LIST", help=BUDGETS)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _budgets(text: str) -> tuple[float | str, ...]:
    """Returns fractions as floats; other texts are for the backend to parse."""
    found = [float(part) if re.fullmatch(r"[\d.]+", part) else part for part in text.replace(" ", "").split(",")]
    for value in found:
        if isinstance(value, float) and not 0.0 < value <= 1.0:
            raise argparse.ArgumentTypeError(
                f"a fraction must lie in (0, 1], got {value:g}; give a size a unit, as in 90MiB"
            )
    return tuple(found)


def run_demo(size: argparse.Namespace) -> int:
    """Run the job and print its table; returns 0 if all losses agree and every measured peak is inside its budget."""
    from compile_remat.cli import demo_job

    return demo_job.run(size)
