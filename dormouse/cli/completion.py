"""`dormouse completion`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from dormouse.errors import InvalidInput

_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def add_to(app: typer.Typer) -> None:
    app.command("completion", epilog='Example: eval "$(dormouse completion bash)"')(completion)


def completion(
    shell: Annotated[str, typer.Argument(help=f"The shell: {', '.join(_SHELLS)}.", show_default=False)],
) -> None:
    """Print what has a shell complete commands and options; --install-completion keeps it for good."""
    if shell not in _SHELLS:
        raise InvalidInput(f"there is no completion for {shell!r}: name one of {', '.join(_SHELLS)}")
    script = get_completion_script(prog_name="dormouse", complete_var="_DORMOUSE_COMPLETE", shell=shell)
    sys.stdout.write(f"{script}\n")
