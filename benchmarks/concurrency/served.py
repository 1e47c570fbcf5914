"""Look-ups through the query service by wrk, a client in C that uses little CPU time."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

PROGRAM = "wrk"
_SCRIPT = """
wrong = 0
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
function init(args)
  math.randomseed(%(seed)d)
end
function request()
  return wrk.format(nil, "%(path)s", nil, '{"where":{"key":' .. math.random(0, %(keys)d - 1) .. '}}')
end
function response(status, headers, body)
  if status ~= 200 or not body:find('"key"', 1, true) then wrong = wrong + 1 end
end
local threads = {}
function setup(thread) table.insert(threads, thread) end
function done(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.timeout
  print(string.format('{"requests":%%d,"microseconds":%%d,"p99":%%d,"failed":%%d}',
    summary.requests, summary.duration, latency:percentile(99), failed + (threads[1]:get("wrong") or 0)))
end
"""


@dataclass(frozen=True)
class Served:
    """The results of the look-ups."""

    per_second: float
    p99_ms: float
    failed: int
    """The number of look-ups that got no answer, an error, or an answer without the row."""


def look_up(url: str, keys: int, connections: int, seconds: float, folder: Path) -> Served:
    """Looks up random keys of the table `lookups` on `connections` connections.

    Raises RuntimeError if wrk fails.
    """
    script = folder / "lookups.lua"
    path = "/v1/tables/lookups/query"
    script.write_text(_SCRIPT % {"seed": connections, "path": path, "keys": keys}, "utf-8")
    address = urlsplit(url)
    command = [PROGRAM, "-t1", f"-c{connections}", f"-d{max(round(seconds), 1)}s", "--timeout", "60s"]
    command += ["-s", str(script), f"{address.scheme}://{address.netloc}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise RuntimeError(f"wrk failed: {done.stderr or done.stdout}") from None
    per_second = 1e6 * found["requests"] / found["microseconds"]
    return Served(per_second, found["p99"] / 1_000, found["failed"])


def is_there() -> bool:
    return shutil.which(PROGRAM) is not None
