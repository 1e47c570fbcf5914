"""The command line: one thin command for each method of the façade.

Text for people, or with `--json` one JSON document; exit codes 0 done, 1 failed, 2 bad usage,
130 interrupted, 143 ended by SIGTERM.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated

import typer

from dormouse.cli import (
    backups,
    changes,
    checks,
    columns,
    commits,
    data,
    demo,
    deployed,
    deployment,
    erase,
    history,
    jobs,
    maintenance,
    moments,
    payloads,
    rows,
    rows_files,
    serve,
    system,
    tables,
)
from dormouse.cli.failures import complain, exit_code_of, interrupts_once, report
from dormouse.cli.output import ReaderGone, guard_streams
from dormouse.errors import DormouseError

app = typer.Typer(
    name="dormouse",
    help="Very large key-sorted tables: Parquet files, PostgreSQL for everything transactional, Spark.",
    epilog="Start with: dormouse demo. The instance is the folder ./lake, unless --instance or "
    "DORMOUSE_INSTANCE says otherwise.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
demo.add_to(app)
tables.add_to(app)
columns.add_to(tables.app)
data.add_to(app)
erase.add_to(app)
changes.add_to(app)
history.add_to(app)
maintenance.add_to(app)
moments.add_to(app)
backups.add_to(app)
checks.add_to(app)
commits.add_to(app)
jobs.add_to(app)
payloads.add_to(app)
rows.add_to(app)
rows_files.add_to(rows.app)
serve.add_to(app)
system.add_to(app)
deployment.add_to(app)
deployed.add_to(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from dormouse import __version__

        typer.echo(f"dormouse {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> int:
    """Runs the command of `sys.argv`; gives its exit code."""
    guard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ is no reason to fail
    if "--debug" not in sys.argv:
        logging.getLogger().addHandler(logging.NullHandler())  # errors are one line, without what led there
    with interrupts_once():
        try:
            return int(app(prog_name="dormouse", standalone_mode=False) or 0)
        except typer.TyperException as error:
            return complain(error)
        except KeyboardInterrupt as error:
            return exit_code_of(error)
        except (ReaderGone, DormouseError) as error:
            return report(error, debug="--debug" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
