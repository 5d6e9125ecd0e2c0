"""The walkthrough is executed, so that it cannot drift from the code."""
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent


def test_walkthrough_runs(tmp_path):
    """A notebook that no longer runs teaches the wrong API."""
    book = nbformat.read(ROOT / "docs" / "walkthrough.ipynb", as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = ["".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in c.outputs)
               for c in book.cells if c.cell_type == "code"]
    assert not any("Traceback" in text for text in outputs)
    learned = next(text for text in outputs if "logp_gap_max" in text)
    gap = float(learned.split("'logp_gap_max': ")[1].split(",")[0].rstrip("}"))
    assert gap < 1e-3
    assert sum("tensor" in text for text in outputs) >= 2  # rewards and advantages are shown
