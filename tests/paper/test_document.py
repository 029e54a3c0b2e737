"""The paper's numbers beside ours as tables, and the document, against what is read off by eye."""

import math

import pandas as pd
import pytest

from rmd_plugin.paper.document import (
    comparison_table,
    order_table,
    rankings,
    reproduction_document,
    write_document,
    write_study,
)
from rmd_plugin.paper.studies import paper_number
from rmd_plugin.report.tables import to_markdown

PACKAGES = {"torch": "2", "pytorch-ood": "0.4", "pytorch-lightning": "2"}
ABOUT = {
    "study": "table1", "about": "Table 1", "notes": ["A note."], "figures": {"picture": "A picture"}, "seconds": 61.0,
    "command": "rmd-reproduce study=table1", "machine": "a laptop",
    "versions": {"commit": "0123456789abcdef", "packages": PACKAGES},
}  # fmt: skip


def line(name, paper, ours=(math.nan,) * 3, **about):
    detectors = {"mahalanobis": "MD", "rmd": "RMD", "msp": "MSP"}
    return [
        paper_number(name, f"AUROC of {label}", one, other, detector, **about)
        for (detector, label), one, other in zip(detectors.items(), paper, ours, strict=True)
    ]


#: the first line of table 1; the same lead with other numbers; another order; nothing of ours
SAME = line("same", (74.91, 81.01, 80.14), (60.0, 70.0, 69.5), setting="a small net", reason="less data")
OTHER = line("other", (74.91, 81.01, 80.14), (60.0, 70.0, 70.5), setting="a small net")
NOT_RUN = line("not run", (97.92, 97.62, 96.99), reason="no weights")
NUMBERS = pd.DataFrame([*SAME, paper_number("same", "leading directions", 120, 3), *OTHER, *NOT_RUN])


def test_only_the_order_of_what_both_sides_have_counts():
    assert [ranking.same for ranking in rankings(NUMBERS)] == [True, False, None]
    without_md = pd.DataFrame([{**SAME[0], "paper": 90.0, "ours": math.nan}, *SAME[1:]])
    (ranking,) = rankings(without_md)  # MD would lead in the paper, but was not run
    assert (list(ranking.paper), ranking.same) == (["RMD", "MSP"], True)


def test_the_tables_show_paper_ours_difference_and_order():
    text = to_markdown(comparison_table(NUMBERS))
    assert "| same | AUROC of MD | 74.91 | 60.00 | -14.91 | a small net. less data |" in text
    assert "| same | AUROC of RMD | 81.01 | 70.00 | -11.01 |  |" in text  # the remark is not repeated
    assert "| not run | AUROC of MD | 97.92 | not run |  | not run: no weights |" in text
    assert "| 120 | 3 | -117 |" in text  # a count is no percentage
    text = to_markdown(order_table(NUMBERS)).replace("\\>", ">")
    assert "| other | RMD > MSP > MD | MSP > RMD > MD | **no** | 0.87 | 0.50 |" in text
    assert "| not run | MD > RMD > MSP | not run |  | 0.30 |  |" in text


def test_the_document_claims_only_what_was_run():
    text = reproduction_document([{**ABOUT, "numbers": NUMBERS}], "pictures")
    assert "7 published numbers have one of ours beside them; 3 were not run here" in text
    assert "Of the 3 lines of the tables, 2 were run here, and 1 of them have the methods in the order" in text
    assert "`rmd-reproduce study=table1 scale=paper` runs them): not run." in text
    assert "![A picture](pictures/picture.png)" in text


def test_the_document_brings_its_pictures(tmp_path):
    folder = tmp_path / "table1"
    folder.mkdir()
    write_study(folder, NUMBERS, **ABOUT)
    (folder / "picture.png").write_bytes(b"png")
    write_document(tmp_path / "R.md", [folder, tmp_path / "absent"])
    assert "](reproduction/picture.png)" in (tmp_path / "R.md").read_text()
    assert (tmp_path / "reproduction" / "picture.png").read_bytes() == b"png"
    with pytest.raises(ValueError, match="no study"):
        write_document(tmp_path / "R.md", [tmp_path / "absent"])
