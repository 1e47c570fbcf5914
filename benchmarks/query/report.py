"""The figures as a table, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.query.experiment import KINDS

_KINDS = {
    "lookup": "one key",
    "range_10": "10 rows",
    "range_10000": "10,000 rows",
    "range_1000000": "1,000,000 rows",
}
_SIDES = {
    "dormouse": "Dormouse",
    "sql": "Dormouse, SQL",
    "duckdb": "DuckDB",
    "polars": "Polars",
    "pyiceberg": "PyIceberg",
}


def table(figures: Mapping[str, Any]) -> str:
    lines = [
        f"{figures['rows']:,} rows in {figures['files']:,} files of {figures['leaves']:,} leaves; medians of "
        f"{figures['rounds']} rounds",
        f"{'':16}" + "".join(f"{_KINDS[kind]:>24}" for kind in KINDS) + f"{'peak MB':>10}",
        f"{'':16}" + f"{'ms':>12}{'ours ÷':>12}" * len(KINDS),
    ]
    for name, label in _SIDES.items():
        cells = "".join(
            f"{_shown(_ms(figures, kind, name)):>12}{_shown(figures.get(f'{kind}_vs_{name}')):>12}"
            for kind in KINDS
        )
        lines.append(f"{label:16}{cells}{figures[f'peak_memory_bytes_{name}'] / 1e6:>10,.0f}")
    return "\n".join(lines)


def _ms(figures: Mapping[str, Any], kind: str, name: str) -> float:
    return float(figures[f"{kind}_ms" if name == "dormouse" else f"{kind}_ms_{name}"])


def _shown(figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{figure:,.0f}" if figure >= 1_000 else f"{figure:,.3g}"


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Milliseconds by the rows of the answer, a line an engine; the kind of file is its suffix's."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    drawing, pane = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, label in _SIDES.items():
        pane.plot([*_KINDS.values()], [_ms(figures, kind, name) for kind in _KINDS], marker="o", label=label)
    pane.set(title="An answer in key order", xlabel="what is asked for", ylabel="milliseconds", yscale="log")
    pane.grid(visible=True, alpha=0.3)
    pane.legend(fontsize="small")
    drawing.savefig(path)
