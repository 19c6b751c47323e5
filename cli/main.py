"""The `shoal` command: its options for all commands, and how an error reaches a person."""

from __future__ import annotations

import os
import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Any

import typer

from cli import demo, doctor, importing, inspection, membership, model, simulate, swarm
from cli.output import say
from node.config import unknown_variables
from protocol.errors import ConfigError, ShoalError, as_shoal_error

INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended
# What a mistyped command line raises; typer names none but this subclass of it.
_UsageError = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="shoal",
    help="Train one language model on many people's computers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("join")(membership.join)
app.command("status")(inspection.status)
app.command("peers")(inspection.peers)
app.command("leave")(membership.leave)
app.command("doctor")(doctor.doctor)
app.command("generate")(model.generate)
app.command("export")(model.export)
app.command("import")(importing.import_)
app.add_typer(swarm.app, name="swarm")
app.add_typer(simulate.app, name="simulate")
app.add_typer(inspection.identity_app, name="identity")
app.add_typer(inspection.config_app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {version('shoal')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    _debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, too.")
    ] = False,
) -> None:
    """Train one language model on many people's computers."""
    for name, near in unknown_variables(os.environ).items():
        meant = f"; did you mean {near}?" if near else ""
        say(f"warning: the variable {name} is no setting and is ignored{meant}")


def main() -> None:
    """Run the command line; end the process with the error's exit status."""
    words = sys.argv[1:]
    # Whoever adds --debug to a failing line adds it at the end: take it from anywhere.
    is_debug = "--debug" in words
    sys.exit(run([word for word in words if word != "--debug"], is_debug=is_debug))


def run(words: list[str], *, is_debug: bool = False) -> int:
    """Run one command line and return its exit status; errors are told on stderr."""
    try:
        status = app(words, prog_name="shoal", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # boundary: whatever it was, a person gets two lines
        return _tell(error, is_debug)
    return status if isinstance(status, int) else 0


def _tell(error: Exception, is_debug: bool) -> int:
    """Print the cause and the remedy of an error; return its exit status."""
    if is_debug:
        say(traceback.format_exc().rstrip())
    known = _in_words(error)
    if known.cause:
        say(f"error[{known.code}]: {known.cause}")
        say(f"remedy: {known.hint}")
    return known.exit_status


def _in_words(error: Exception) -> ShoalError:
    """Return the error in our words; a command without a subcommand has told its help already."""
    if not isinstance(error, _UsageError):
        return as_shoal_error(error)
    known: Any = error
    command = known.ctx.command_path if known.ctx else "shoal"
    cause = " ".join(known.format_message().split()).rstrip(".")
    return ConfigError(cause[:1].lower() + cause[1:], f"See `{command} --help`.")
