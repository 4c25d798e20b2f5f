"""The command `compile-remat`. Each subcommand is imported when it runs, so `--help` is instant.

To add a subcommand, add one row to `COMMANDS`: the module is imported only if the subcommand is chosen.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from compile_remat._util.user_warnings import printed_warnings


@dataclass(frozen=True)
class Command:
    """One subcommand: `module` has `arguments(parser)`, and `run` in it takes the parsed arguments."""

    name: str
    help: str
    module: str
    run: str
    arguments: str = "add_arguments"


PLAN = "compile_remat.cli.plan"

COMMANDS = (
    Command(
        "calibrate", "measure this device and write it as a device file", "compile_remat.cli.calibrate", "run_calibrate"
    ),
    Command(
        "demo", "train a small GPT plainly and inside two budgets, and compare", "compile_remat.cli.demo", "run_demo"
    ),
    Command("plan", "plan a model for a device that need not be here", PLAN, "run_plan", "add_plan_arguments"),
    Command("pareto", "print its plans from the fastest to the lowest", PLAN, "run_pareto", "add_pareto_arguments"),
    Command(
        "explain", "print its plan with the largest tensors at the peak", PLAN, "run_explain", "add_explain_arguments"
    ),
    Command("devices", "print the device table with its sources", "compile_remat.cli.devices", "run_devices"),
    Command("doctor", "print versions, what is missing, and the settings", "compile_remat.cli.doctor", "run_doctor"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status, or 2 for a RematError, 130 for Ctrl-C, 141 for a closed pipe."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parsed = _parser(arguments).parse_args(arguments)
    command: Command = parsed.command
    from compile_remat.errors import RematError

    try:
        with printed_warnings():
            status = int(getattr(importlib.import_module(command.module), command.run)(parsed))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # for example, `compile-remat devices | head -2`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more when it ends
        return 141
    except RematError as error:
        print("\n".join([f"compile-remat {command.name}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, RuntimeError) as error:
        if not _is_interrupt(error):
            raise
        print(f"compile-remat {command.name}: interrupted", file=sys.stderr)
        return 130


def _is_interrupt(error: BaseException) -> bool:
    """Returns True for Ctrl-C, also inside of Python 3.11's RuntimeError from class creation (``Error calling __set_name__``)."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns a parser of all subcommands with their help, but only with the flags of the chosen one."""
    parser = argparse.ArgumentParser(
        prog="compile-remat", description="torch.compile under a memory budget", allow_abbrev=False
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        subparser.set_defaults(command=command)
        if command.name == chosen:
            add_arguments = getattr(importlib.import_module(command.module), command.arguments, None)
            if add_arguments is not None:
                add_arguments(subparser)
    return parser
