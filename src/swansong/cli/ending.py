"""How a run of the program ends: its exit code, and one line on standard error if something was wrong."""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TextIO

import typer

from swansong.cli.options import Session
from swansong.cli.text import printable
from swansong.errors import SwansongError, SwansongWarning

PROBLEM: Final = 1
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells count."""
UNREAD: Final = 141
"""128 + SIGPIPE: whoever read the output has gone."""


def ended(body: Callable[[], int], session: Session) -> int:
    """Run `body`; return its result, or the exit code for whatever it raised, which is then reported.

    Our warnings become lines on standard error too.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is no reason to stop.
        sys.stdout.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.simplefilter("always", SwansongWarning)
        warnings.showwarning = _show_warning
        try:
            code = body()
            if sys.stdout is not None:
                sys.stdout.flush()
        except typer.Exit as error:
            code = error.exit_code
        except KeyboardInterrupt:
            code = INTERRUPTED
        except BrokenPipeError:
            code = UNREAD
        except typer.TyperException as error:
            complain(_usage(error))
            code = error.exit_code
        except Exception as error:  # noqa: BLE001  the process ends here; nobody else would report it
            complain(_in_words(error))
            if session.debug:
                traceback.print_exc()
            code = PROBLEM
    _drain(sys.stdout)
    return code


def complain(message: str) -> None:
    """Print one line on standard error, whatever `message` contains."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"swansong: {printable(message)}", file=sys.stderr, flush=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    complain(f"warning: {message}")


def _usage(error: typer.TyperException) -> str:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message.rstrip('.')}; see '{context.command_path} --help'"


def _in_words(error: Exception) -> str:
    match error:
        case OSError(strerror=str(reason)) if isinstance(error, SwansongError):
            return reason  # says all, without "[Errno 111]" before it
        case SwansongError():
            return str(error)
        case OSError(filename=str(name), strerror=str(reason)):
            return f"{name}: {reason}"
        case OSError(strerror=str(reason)):
            return reason
        case MemoryError():
            return "out of memory"
        case _:
            kind = type(error).__name__
            return f"internal error: {kind}: {error} (--debug shows where; please report it)"


def _drain(stream: TextIO | None) -> None:
    """Flush; what nobody takes is dropped, or the interpreter would complain of it once more at its end."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(sink, stream.fileno())
        os.close(sink)
