"""The program of `make docs`, which writes the generated pages."""

from __future__ import annotations

from documentation import ROOT, pages

for name, render in pages().items():
    (ROOT / "docs" / "reference" / name).write_text(render(), "utf-8")
