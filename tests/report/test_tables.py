import io
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from rmd_plugin.compare.rows import Row
from rmd_plugin.report.table import Cell, Column, Table, to_html, to_latex, to_markdown, to_terminal
from rmd_plugin.report.tables import (
    comparison_tables,
    decision_tables,
    interval,
    near_far_means,
    percent,
    ranking,
    seconds,
)


def auroc(detector, ood, value, distance="near", **more):
    return Row("digits", ood, "mlp", detector, 0, "AUROC", value, distance=distance, **more)


ROWS = [
    auroc("msp", "six", 0.80),
    auroc("msp", "seven", 0.90),
    auroc("msp", "noise", 0.99, "far", low=0.98, high=1.0),
    auroc("rmd", "six", 0.90, low=0.88, high=0.915),
    auroc("rmd", "seven", 0.94),
    auroc("rmd", "noise", 0.97, "far"),
    auroc("gram", "", math.nan).failed("needs maps", "skipped"),
    auroc("rankfeat", "", math.nan).failed("needs maps", "skipped"),
    auroc("vim", "", math.nan).failed("ValueError: too wide"),
    Row("digits", "six", "mlp", "msp", 0, "FPR95TPR", 0.5, distance="near"),
    Row("digits", "six", "mlp", "rmd", 0, "FPR95TPR", 0.25, distance="near"),
    Row("digits", "", "mlp", "rmd", 0, "fit_seconds", 0.123),
    Row("digits", "", "mlp", "rmd", 0, "score_seconds", 12.34),
    Row("digits", "", "mlp", "", 0, "ACC", 0.975, reason="linear probe"),
]

NASTY = Table(
    [Column("A & B", "left"), Column("x_y", detail="(100 %)")],
    [[Cell("a|b <i> \\ $1 {}"), Cell("1", bold=True, detail="[0, 2]")], [Cell("[x]"), Cell("")]],
    title="50 % & more_#",
    notes=["one ~ note^"],
)


def column(table, title):
    place = [head.title for head in table.columns].index(title)
    return [row[place] for row in table.rows]


def test_means_are_taken_over_near_and_over_far_sets():
    means = near_far_means(ROWS)
    assert means["msp"]["near"] == pytest.approx(0.85)
    assert means["msp"]["far"] == pytest.approx(0.99)
    assert means["rmd"]["all"] == pytest.approx((0.90 + 0.94 + 0.97) / 3)


def test_a_mean_over_a_failed_set_is_missing_instead_of_flattering():
    rows = [*ROWS, auroc("rmd", "eight", 0.5).failed("NaN")]
    assert math.isnan(near_far_means(rows)["rmd"]["near"])


def test_detectors_are_ranked_by_near_mean_and_failed_ones_are_left_out():
    assert ranking(ROWS) == ["rmd", "msp"]
    far = [replace(row, distance="far") for row in ROWS]
    assert ranking(far) == ["rmd", "msp"]
    assert ranking([replace(row, distance="far") for row in ROWS if row.ood == "noise"]) == ["msp", "rmd"]


def test_the_best_of_every_column_is_bold_and_the_lowest_false_positive_rate_is_best():
    (table,) = comparison_tables(ROWS)
    assert [cell.text for cell in column(table, "Detector")] == ["RMD", "MSP"]
    assert [cell.bold for cell in column(table, "six")] == [True, False]
    assert [cell.bold for cell in column(table, "noise")] == [False, True]
    assert [(cell.text, cell.bold) for cell in column(table, "near mean")] == [("92.00", True), ("85.00", False)]
    assert [(cell.text, cell.bold) for cell in column(table, "far mean")] == [("97.00", False), ("99.00", True)]
    assert [cell.bold for cell in column(table, "FPR95, near")] == [True, False]


def test_numbers_that_look_equal_are_both_bold():
    (table,) = comparison_tables([auroc("a", "x", 0.90001), auroc("b", "x", 0.90003), auroc("c", "x", 0.8)])
    assert [cell.bold for cell in column(table, "AUROC, x")] == [True, True, False]


def test_intervals_times_and_the_reasons_of_failures_are_in_the_table():
    (table,) = comparison_tables(ROWS)
    assert column(table, "six")[0].detail == "[88.0–91.5]"
    assert column(table, "fit")[0].text == "0.12"
    assert column(table, "fit")[1].text == "–"
    assert column(table, "score")[0].text == "12.3"
    assert table.notes == [
        "Accuracy on the in-distribution test set: 97.50 % (linear probe).",
        "Failed: ViM (ValueError: too wide).",
        "Not supported: Gram, RankFeat (needs maps).",
    ]


def test_one_table_for_each_benchmark_backbone_and_seed():
    rows = [*ROWS, *(replace(row, seed=1) for row in ROWS), *(replace(row, backbone="bert") for row in ROWS)]
    titles = [table.title for table in comparison_tables(rows)]
    assert [title.split(":")[0] for title in titles] == [
        "digits, mlp, seed 0",
        "digits, mlp, seed 1",
        "digits, bert, seed 0",
    ]


def test_no_rows_give_no_table_and_failures_alone_a_table_of_reasons():
    assert comparison_tables([]) == []
    (table,) = comparison_tables([auroc("vim", "", math.nan).failed("broken")])
    assert table.rows == []
    assert table.notes == ["Failed: ViM (broken)."]


def test_a_table_whose_rows_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="row 0 has 1 cells, the table has 2 columns"):
        Table([Column("a"), Column("b")], [[Cell("x")]])


def test_markdown_has_as_many_cells_in_every_line():
    (table,) = comparison_tables(ROWS)
    lines = [line for line in to_markdown(table).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| RMD | **90.00** [88.0–91.5] |" in lines[2]


def test_markdown_cells_cannot_break_out():
    first = to_markdown(NASTY).splitlines()[4]
    assert first == r"| a\|b \<i\> \\ $1 {} | **1** [0, 2] |"


class Reader(HTMLParser):
    """Collects the cells of a fragment and checks that every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.cells = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.cells[-1] += data


def test_html_is_well_formed_and_says_what_the_cells_say():
    reader = Reader()
    reader.feed(to_html(NASTY))
    reader.close()
    assert reader.open == []
    assert reader.cells == ["A & B", "x_y (100 %)", "a|b <i> \\ $1 {}", "1 [0, 2]", "[x]", ""]


def test_latex_escapes_everything_special():
    text = to_latex(NASTY, label="tab:x")
    assert r"50 \% \& more\_\#" in text
    assert r"{}a\textbar{}b \textless{}i\textgreater{} \textbackslash{} \$1 \{\}" in text
    assert r"\textbf{1} {\scriptsize [0, 2]}" in text
    # every row of the tabular has one & less than columns
    body = re.search(r"\\midrule\n(.*)\\bottomrule", text, re.DOTALL).group(1)
    assert all(len(re.findall(r"(?<!\\)&", line)) == 1 for line in body.splitlines())


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(tmp_path):
    body = to_latex(NASTY) + "".join(map(to_latex, comparison_tables(ROWS)))
    (tmp_path / "t.tex").write_text(
        rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    )
    subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True, capture_output=True)


def test_the_terminal_shows_the_best_in_bold_and_all_text_when_narrow():
    (table,) = comparison_tables(ROWS)
    wide = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="standard", legacy_windows=False)
    wide.print(to_terminal(table, width=160))
    assert re.search(r"\x1b\[1m *92\.00\x1b\[0m", wide.file.getvalue())
    for width in (90, 80, 40):
        narrow = Console(file=io.StringIO(), width=width)
        narrow.print(to_terminal(table, width=width))
        shown = narrow.file.getvalue()
        numbers = [text for row in table.rows for cell in row for text in (cell.text, cell.detail)]
        assert all(shown.count(text) >= numbers.count(text) for text in numbers)  # no digit is lost
        assert max(map(len, shown.splitlines())) <= width
        assert "Not supported: Gram, RankFeat (needs maps)." in " ".join(shown.split())


def test_a_name_in_square_brackets_is_not_taken_for_markup():
    console = Console(file=io.StringIO(), width=80)
    console.print(to_terminal(NASTY))
    assert "[x]" in console.file.getvalue()


def test_numbers_are_written_as_readers_expect():
    assert [percent(value) for value in (1.0, 0.97216, math.nan)] == ["100.00", "97.22", ""]
    assert [seconds(value) for value in (0.0, 0.004, 9.994, 10.0, 123.4)] == ["0.00", "0.00", "9.99", "10.0", "123"]
    assert interval(auroc("a", "x", 0.5)) == ""


DECISIONS = [
    Row("digits", "", "mlp", "rmd", 0, "threshold@0.05", 12.3456),
    Row("digits", "", "mlp", "rmd", 0, "false_alarms@0.05", 0.06, low=0.04, high=0.09),
    Row("digits", "six", "mlp", "rmd", 0, "detected@0.05", 0.75, distance="near", low=0.7, high=0.8),
    Row("digits", "six", "mlp", "msp", 0, "detected@0.05", 0.5, distance="near", low=0.4, high=0.6),
    Row("digits", "", "mlp", "msp", 0, "threshold@0.05", -0.5),
    Row("digits", "", "mlp", "msp", 0, "false_alarms@0.05", 0.05, low=0.03, high=0.08, reason="it has seen them"),
    Row("digits", "", "mlp", "vim", 0, "false_alarms@0.05", math.nan).failed("NaN", "skipped"),
]


def test_decisions_stand_in_a_table_of_their_own():
    [table] = decision_tables([*ROWS, *DECISIONS])
    assert "at most 5 % false alarms" in table.title
    assert [cell.text for cell in column(table, "Detector")] == ["RMD", "MSP"]
    assert [(cell.text, cell.detail) for cell in column(table, "False alarms")] == [
        ("6.00", "[4.0–9.0]"),
        ("5.00", "[3.0–8.0]"),
    ]
    assert [(cell.text, cell.bold) for cell in column(table, "six")] == [("75.00", True), ("50.00", False)]
    assert [cell.text for cell in column(table, "noise")] == ["–", "–"]
    assert [cell.text for cell in column(table, "threshold")] == ["12.35", "-0.5"]
    assert table.notes == ["Remark: MSP (it has seen them)."]


def test_a_detector_without_decisions_says_why_below_the_comparison():
    [with_decisions], [without] = comparison_tables([*ROWS, *DECISIONS]), comparison_tables(ROWS)
    assert with_decisions.notes == [*without.notes, "No decisions: ViM (NaN)."]
    assert (with_decisions.columns, with_decisions.rows) == (without.columns, without.rows)
    assert decision_tables([*ROWS, DECISIONS[-1]]) == []


def test_without_decisions_there_is_no_table():
    assert decision_tables(ROWS) == []
    # a file may hold anything
    assert decision_tables([Row("digits", "", "mlp", "rmd", 0, "false_alarms@x", 0.1)]) == []
