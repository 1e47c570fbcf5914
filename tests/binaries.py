"""A check that the binaries of a package run in Lambda's runtime."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

from packages import LAMBDA, Architecture

ELF_MACHINES = {"x86_64": "EM_X86_64", "arm64": "EM_AARCH64"}
OF_THE_RUNTIME = re.compile(r"(ld-linux-(x86-64|aarch64)|lib(c|m|dl|rt|z|pthread|resolv|gcc_s))\.so\.\d")
"""The libraries of Lambda's minimal Amazon Linux 2023 image. It has no libstdc++."""

GCC_OF_THE_RUNTIME = (11,)


def lacking(package: Path, architecture: Architecture) -> Iterator[str]:
    """Yields a line for each binary with a wrong processor, a missing library or a symbol that is too new."""
    binaries = [path for path in package.rglob("*.so*") if path.read_bytes().startswith(b"\x7fELF")]
    own = {path.name for path in binaries}
    if not own:
        yield f"{package.name} has no binaries"
    for path in binaries:
        machine, libraries, symbols = _needs(path)
        if machine != ELF_MACHINES[architecture]:
            yield f"{path} is for {machine}"
        for one in libraries - own:
            if not OF_THE_RUNTIME.fullmatch(one):
                yield f"{path} needs {one}"
        for one in symbols:
            if _is_too_new(one):
                yield f"{path} needs {one}"


def _needs(path: Path) -> tuple[str, set[str], set[str]]:
    """Returns a binary's machine, the libraries that it names, and the versions of their symbols."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic, versions = map(elf.get_section_by_name, (".dynamic", ".gnu.version_r"))
        libraries = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
        symbols = {one.name for _, every in versions.iter_versions() for one in every} if versions else set()
        return elf["e_machine"], libraries, symbols


def _is_too_new(symbol: str) -> bool:
    """Returns whether a version such as `GLIBC_2.27` is newer than the runtime's.

    Versions of the package's own libraries never are.
    """
    family, _, version = symbol.partition("_")
    newest = {"GLIBC": (2, LAMBDA.glibc_minor), "GCC": GCC_OF_THE_RUNTIME}.get(family)
    return newest is not None and tuple(map(int, version.split("."))) > newest
