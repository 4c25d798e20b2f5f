"""The command `compile-remat`. Each subcommand is imported when it runs, so `--help` is instant.

To add a subcommand, add one row to `COMMANDS`: the module is imported only if the subcommand is chosen.
"""

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, NoReturn

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

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a write to a stream: a full disk, an exceeded quota, a stream that is not open for writing."""

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
    Command("schema", "print the JSON Schema of a command's --json", "compile_remat.cli.schema", "run_schema"),
    Command("doctor", "print versions, what is missing, and the settings", "compile_remat.cli.doctor", "run_doctor"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status.

    The status is 2 for a RematError and for an output that takes no more bytes, 130 for Ctrl-C, 141 for a closed pipe.  Where
    standard output or standard error is closed from the start (``>&-``), its text is dropped.
    """
    _open_closed_streams()
    arguments = _joined_to_options(sys.argv[1:] if argv is None else argv)
    name = "compile-remat"
    try:
        try:
            parsed = _parser(arguments).parse_args(arguments)
            command: Command = parsed.command
            name = f"compile-remat {command.name}"
            with printed_warnings():
                return int(getattr(importlib.import_module(command.module), command.run)(parsed))
        finally:
            sys.stdout.flush()  # an output that cannot be written counts, also after `--help`
    except BrokenPipeError:  # for example, `compile-remat devices | head -2`
        _drop_output()
        return 141
    except Exception as error:
        return _said(error, name)
    except KeyboardInterrupt:
        return _interrupted(name)


def _joined_to_options(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with ``--budget -1GiB`` as ``--budget=-1GiB``: argparse takes `-1GiB` for an option of its own."""
    joined = list[str]()
    for argument in arguments:
        if re.match(r"-\.?\d", argument) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _said(error: Exception, name: str) -> int:
    """Print what ended a command and return its status; raises an exception that nobody expects once more."""
    from compile_remat.errors import RematError

    if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11's RuntimeError: "Error calling __set_name__"
        return _interrupted(name)
    if isinstance(error, RematError):
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    elif isinstance(error, OSError) and error.errno in _CANNOT_WRITE and error.filename is None:
        _drop_output()
        text = f"cannot write: {error.strerror}"
    else:
        raise error
    _print_error(f"{name}: {text}")
    return 2


def _interrupted(name: str) -> int:
    _print_error(f"{name}: interrupted")
    return 130


def _print_error(text: str) -> None:
    """Print a line to standard error; if that cannot be written either, the status alone says what has happened."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        _drop_output()


def _open_closed_streams() -> None:
    """Give Python a stream for each one that was closed before it started: it has None there, and `print` would use the other."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def _drop_output() -> None:
    """Send what the streams still hold to nowhere: Python flushes them once more when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Version(argparse.Action):
    """Prints the versions of this package, of torch and of Python, and ends; looks them up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the versions and exit."""
        import platform
        from importlib.metadata import PackageNotFoundError, version

        try:
            own = version("compile-remat")
        except PackageNotFoundError:
            own = "of a checkout that is not installed"
        print(f"compile-remat {own} (torch {version('torch')}, Python {platform.python_version()})")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage, which has one line for each flag."""

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """Print the help; raises OSError if it cannot be written, which argparse's own function hides."""
        print(self.format_help(), end="", file=file or sys.stdout)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help has the arguments)\n")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns a parser of all subcommands with their help, but only with the flags of the chosen one."""
    parser = _Parser(prog="compile-remat", description="torch.compile under a memory budget", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of this, torch and Python")
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
