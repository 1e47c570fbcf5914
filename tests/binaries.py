"""What the binaries of a package need of the machine that they run on, and Lambda's runtime lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile

from packages import LAMBDA, Architecture

ELF_MACHINES = {"x86_64": "EM_X86_64", "arm64": "EM_AARCH64"}
OF_THE_RUNTIME = re.compile(r"(ld-linux-(x86-64|aarch64)|lib(c|m|dl|rt|z|pthread|resolv|gcc_s))\.so\.\d")
"""Libraries of Amazon Linux 2023 as Lambda has it, its smallest image: no libstdc++ among them."""

GCC_OF_THE_RUNTIME = (11,)


def lacking(package: Path, architecture: Architecture) -> Iterator[str]:
    """A line for each binary of another processor, each library that is not there, each symbol too new."""
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
    """The machine that a binary is for, the libraries that it names, the versions of symbols in them."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic, versions = map(elf.get_section_by_name, (".dynamic", ".gnu.version_r"))
        libraries = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
        symbols = {one.name for _, every in versions.iter_versions() for one in every} if versions else set()
        return elf["e_machine"], libraries, symbols


def _is_too_new(symbol: str) -> bool:
    """Of `GLIBC_2.27` and the like; what libraries in the package call their versions is their own."""
    family, _, version = symbol.partition("_")
    newest = {"GLIBC": (2, LAMBDA.glibc_minor), "GCC": GCC_OF_THE_RUNTIME}.get(family)
    return newest is not None and tuple(map(int, version.split("."))) > newest
