"""Which process this is, so that another may find out whether it still lives."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_STARTED = 19  # in /proc/<pid>/stat, counted from the state, which follows the name in parentheses


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some host; what is empty is not known."""

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: str = ""

    def is_gone(self) -> bool:
        """Whether it has surely ended: it was of this host, boot and namespace, and is not there any more."""
        # machines that go on from one snapshot have one boot
        here = (socket.gethostname(), boot(), namespace())
        if not (self.boot and self.namespace) or (self.host, self.boot, self.namespace) != here:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        state, started = _state_of(self.pid)
        return state in {"Z", "X"} or bool(started and self.started and started != self.started)

    def __str__(self) -> str:
        where = f" on host {self.host}" if self.host else ""
        return f"process {self.pid or '?'}{where}"


def this_process() -> Process:
    """The one that asks."""
    return process_here(os.getpid())


def process_here(pid: int) -> Process:
    """Returns the process that has an id in this namespace now."""
    return Process(socket.gethostname(), boot(), namespace(), pid, _state_of(pid)[1])


def boot() -> str:
    """The id of the host's boot; empty where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace() -> str:
    """The namespace in which process ids mean what they mean here; empty where it is not told."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _state_of(pid: int) -> tuple[str, str]:
    """Its state, and when it started, in ticks since the boot; empty where it is not told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], fields[_STARTED]
    except (OSError, IndexError):
        return "", ""
