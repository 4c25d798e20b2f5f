"""The hook of mkdocs for `reference/cli.md`: it puts the help of every command in the place of a mark."""

import argparse
import importlib
from typing import Any

from compile_remat import cli

MARK = "<!-- help of all commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the page with the help of all commands in the place of the mark."""
    return markdown.replace(MARK, help_of_commands())


def help_of_commands() -> str:
    """Returns a section for each command, with its help as the command prints it at a width of 100 columns."""
    return "\n\n".join(f"## {each.name}\n\n```text\n{parser_of(each).format_help()}```" for each in cli.COMMANDS)


def parser_of(command: cli.Command) -> argparse.ArgumentParser:
    """Returns a parser with the arguments of one command."""
    parser = argparse.ArgumentParser(
        prog=f"compile-remat {command.name}",
        description=command.help,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100),
    )
    add_arguments = getattr(importlib.import_module(command.module), command.arguments, None)
    if add_arguments is not None:
        add_arguments(parser)
    return parser
