"""The command line's entry: the table of commands, and what holds for all of them.

A command is a module with a function `command`, whose parameters are its arguments and whose result is the
exit code; a row in COMMANDS makes it known. Exit codes: 0 fine, 1 a problem (damage, nothing found,
unreadable), 2 wrong use, 130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperGroup

import swansong
from swansong.cli import controller as controller_command
from swansong.cli import incident as incident_command
from swansong.cli import inspect as inspect_command
from swansong.cli import list as list_command
from swansong.cli import persist as persist_command
from swansong.cli import status as status_command
from swansong.cli import verify as verify_command
from swansong.cli.ending import ended
from swansong.cli.options import Debug, Session

COMMANDS: Final[dict[str, Callable[..., int]]] = {
    "list": list_command.command,
    "inspect": inspect_command.command,
    "verify": verify_command.command,
    "controller": controller_command.command,
    "status": status_command.command,
    "persist": persist_command.command,
    "incident": incident_command.command,
}


class Program(TyperGroup):
    """The commands as one program, whose errors are one line each."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **__: Any
    ) -> NoReturn:
        """Run the program and leave the process with its exit code."""
        session = Session()

        def body() -> int:
            arguments = list(sys.argv[1:] if args is None else args)
            with self.make_context("swansong", arguments, obj=session) as context:
                return int(self.invoke(context) or 0)

        sys.exit(ended(body, session))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"swansong {swansong.__version__}")
        raise typer.Exit


def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Look after the checkpoints of training runs."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        context.fail("missing command")


def _build() -> typer.Typer:
    program = typer.Typer(
        name="swansong",
        cls=Program,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: 0 fine; 1 a problem (damage, nothing found, unreadable); 2 wrong use.",
    )
    program.callback(invoke_without_command=True)(_program)
    for name, function in COMMANDS.items():
        program.command(name)(function)
    return program


app: Final = _build()


def run() -> NoReturn:
    """Run `swansong` with the arguments of the process."""
    app()
    raise AssertionError("Program.main leaves the process")
