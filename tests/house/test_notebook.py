"""The notebook of the documentation, which runs from its first cell to its last without a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first-hour.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # like a kernel: one namespace, and standard streams that are not a terminal
    done = subprocess.run(
        [sys.executable, "-"],
        input="\n\n".join(cells),
        cwd=tmp_path,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == [
        "8255 flights never left",
        "336776 rows a moment ago, 328521 now",
    ]
    # the notebook contains the outputs of its cells, none of them an error
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert outputs and all(output["output_type"] != "error" for output in outputs)
