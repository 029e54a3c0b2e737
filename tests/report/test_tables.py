import math
import re

import numpy as np
import pytest
from report_kit import auroc_row

from rmd_plugin.compare.rows import auroc_interval, make_row, make_rows, select
from rmd_plugin.report.tables import (
    Cell,
    Column,
    Table,
    advice,
    choose,
    comparison_tables,
    decision_tables,
    joint_tables,
    near_far_means,
    print_tables,
    ranking,
    to_html,
    to_latex,
    to_markdown,
)


def number_row(detector, metric, value=math.nan, ood="", **more):
    return make_row("digits", ood, "mlp", detector, 0, metric, value, distance="near" if ood else "", **more)


RECORDS = [
    auroc_row("msp", "six", 0.80),
    auroc_row("msp", "seven", 0.90),
    auroc_row("msp", "noise", 0.99, "far", low=0.98, high=1.0),
    auroc_row("rmd", "six", 0.90, low=0.88, high=0.915),
    auroc_row("rmd", "seven", 0.94),
    auroc_row("rmd", "noise", 0.97, "far"),
    auroc_row("gram", "", status="skipped", reason="needs maps"),
    auroc_row("rankfeat", "", status="skipped", reason="needs maps"),
    auroc_row("vim", "", status="failed", reason="ValueError: too wide"),
    number_row("msp", "FPR95TPR", 0.5, "six"),
    number_row("rmd", "FPR95TPR", 0.25, "six"),
    number_row("rmd", "fit_seconds", 0.123),
    number_row("rmd", "score_seconds", 12.34),
    number_row("", "ACC", 0.975, reason="linear probe"),
]
DECISIONS = [
    number_row("rmd", "threshold@0.05", 12.3456),
    number_row("rmd", "false_alarms@0.05", 0.06, low=0.04, high=0.09),
    number_row("rmd", "detected@0.05", 0.75, "six", low=0.7, high=0.8),
    number_row("msp", "threshold@0.05", -0.5),
    number_row("msp", "false_alarms@0.05", 0.05, reason="it has seen them"),
    number_row("msp", "detected@0.05", 0.5, "six"),
    number_row("vim", "false_alarms@0.05", status="skipped", reason="NaN"),
]
ROWS = make_rows(RECORDS)
EVIL = "a|b\n<script>x</script> ![x](http://example.org/x) \\input{x} 50 % & more_# $1 {} ~^"
NASTY = Table([Column(EVIL, EVIL, "left"), Column("x")], [[Cell(EVIL, True, EVIL), Cell("[y]")]], EVIL, [EVIL])


def column(table, title):
    place = [head.title for head in table.columns].index(title)
    return [row[place] for row in table.rows]


def test_means_over_near_and_far_sets_are_missing_where_a_set_failed():
    means = near_far_means(ROWS)
    assert means.loc["msp"].tolist() == pytest.approx([0.85, 0.99, (0.8 + 0.9 + 0.99) / 3])
    failed = make_rows([*RECORDS, auroc_row("rmd", "eight", status="failed", reason="NaN")])
    assert math.isnan(near_far_means(failed).loc["rmd", "near"])


def test_detectors_are_ranked_by_near_mean_and_failed_ones_are_left_out():
    assert ranking(ROWS) == ["rmd", "msp"]
    assert ranking(select(ROWS, ood="noise")) == ["msp", "rmd"]
    assert ranking(select(ROWS, metric="fit_seconds")) == ["rmd"]


def test_a_comparison_has_numbers_intervals_times_and_reasons():
    (table,) = comparison_tables(ROWS)
    assert [cell.text for cell in column(table, "Detector")] == ["RMD", "MSP"]
    assert column(table, "six")[0] == Cell("90.00", True, "[88.0–91.5]")
    assert [(cell.text, cell.bold) for cell in column(table, "near mean")] == [("92.00", True), ("85.00", False)]
    assert [(cell.text, cell.bold) for cell in column(table, "far mean")] == [("97.00", False), ("99.00", True)]
    assert [cell.bold for cell in column(table, "FPR95")] == [True, False]
    assert [cell.text for cell in column(table, "fit")] == ["0.12", "–"]
    assert table.notes == [
        "Accuracy on the in-distribution test set: 97.50 % (linear probe).",
        "Failed: ViM (ValueError: too wide).",
        "Not supported: Gram, RankFeat (needs maps).",
    ]


def test_failures_alone_are_reasons():
    assert comparison_tables(make_rows()) == []
    (table,) = comparison_tables(select(ROWS, detector="vim"))
    assert (table.rows, table.notes) == ([], ["Failed: ViM (ValueError: too wide)."])


def test_decisions_show_what_is_found_before_what_it_costs():
    (table,) = decision_tables(make_rows([*RECORDS, *DECISIONS]))
    titles = [head.title for head in table.columns]
    assert titles == ["Detector", "six", "seven", "noise", "False alarms", "threshold"]
    assert column(table, "False alarms")[0] == Cell("6.00", False, "[4.0–9.0]")
    assert [cell.text for cell in column(table, "threshold")] == ["12.35", "-0.5"]
    assert [cell.text for cell in column(table, "six")] == ["75.00", "50.00"]
    assert table.notes == ["Remark: MSP (it has seen them)."]
    assert decision_tables(ROWS) == []
    assert comparison_tables(make_rows([*RECORDS, *DECISIONS]))[0].notes[-1] == "No decisions: ViM (NaN)."


def test_what_is_detected_at_the_price_of_more_false_alarms_is_not_the_best():
    records = [*RECORDS, *DECISIONS, auroc_row("knn", "six", 0.8), number_row("knn", "detected@0.05", 0.9, "six")]
    records.append(number_row("knn", "false_alarms@0.05", 0.2, reason="more false alarms than promised"))
    (table,) = decision_tables(make_rows(records))
    assert [cell.text for cell in column(table, "six")] == ["75.00", "50.00", "90.00"]
    assert [cell.bold for cell in column(table, "six")] == [True, False, False]


def test_no_name_breaks_out_of_a_format():
    markdown, latex, html = to_markdown(NASTY), to_latex(NASTY, label="tab:x"), to_html(NASTY)
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {3}
    assert "](" not in markdown.replace("\\](", "")
    assert "<script>" not in html + markdown.replace("\\<script\\>", "")
    assert r"\input" not in latex
    assert r"50 \% \& more\_\# \$1 \{\} \textasciitilde{}\textasciicircum{}" in latex
    body = re.search(r"\\midrule\n(.*)\\bottomrule", latex, re.DOTALL).group(1)
    assert len(re.findall(r"(?<!\\)&", body)) == 1
    assert r"\label{tab:x}" in latex


def test_every_format_shows_the_numbers(capsys):
    (table,) = comparison_tables(ROWS)
    assert "| RMD | **90.00** [88.0–91.5] | **94.00** |" in to_markdown(table)
    assert r"{}RMD & \textbf{90.00} {\scriptsize [88.0--91.5]} & \textbf{94.00}" in to_latex(table)
    assert '<strong>90.00</strong> <span class="detail">[88.0–91.5]</span>' in to_html(table)
    for width in (200, 80):
        print_tables([table], width=width)
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= width
        for text in ("RMD", "90.00", "[88.0–91.5]", "92.00", "Not supported: Gram, RankFeat (needs maps)."):
            assert text in printed


# -- which detector to take -------------------------------------------------------------------------------------------


def test_the_leader_is_judged_by_near_sets():
    choice = choose(make_rows([*RECORDS, *DECISIONS]))
    assert (choice.detector, choice.judged, choice.rivals) == ("rmd", "near", None)
    assert choice.auroc == pytest.approx(0.92)
    assert (choice.alpha, choice.alarms, choice.alarms_interval) == (0.05, 0.06, (0.04, 0.09))
    assert choice.detected == 0.75
    assert "not tested" in " ".join(advice(choice))
    far = choose(select(ROWS, distance="far"))
    assert (far.detector, far.judged, math.isnan(far.alpha)) == ("msp", "all", True)
    assert choose(make_rows()) is None
    assert advice(None) == []


def scored(rng, gap, sets=("cats", "dogs"), noise=0.3, size=300, others=("knn",)):
    """Detectors that see the same samples; on OOD samples the first has scores higher by ``gap``."""
    base = {"test": rng.normal(size=size), **{name: rng.normal(1.0, size=size) for name in sets}}
    scores = {}
    for name, more in (("rmd", gap), *((name, 0.0) for name in others)):
        scores[name] = {key: x + noise * rng.normal(size=size) + more * (key != "test") for key, x in base.items()}
    rows = [
        auroc_row(name, ood, (x > found["test"][:, None]).mean())
        for name, found in scores.items() for ood, x in found.items() if ood != "test"
    ]  # fmt: skip
    return make_rows(rows), scores


def test_equally_good_detectors_are_rivals_at_the_rate_that_the_level_says():
    rng = np.random.default_rng(0)
    share = np.mean([bool(choose(*scored(rng, gap=0.0)).rivals) for _ in range(150)])
    assert 0.90 < share < 0.99
    others = [f"d{number}" for number in range(8)]
    complete = [len(choose(*scored(rng, gap=0.0, others=others)).rivals) == 8 for _ in range(30)]
    assert np.mean(complete) >= 0.9


def test_a_paired_difference_is_told_where_the_intervals_overlap():
    rows, scores = scored(np.random.default_rng(0), gap=0.25)
    resampled = {name: auroc_interval(found["test"], found["cats"]) for name, found in scores.items()}
    assert resampled["knn"][1] > resampled["rmd"][0]
    assert choose(rows, scores).rivals == []


def test_a_number_below_chance_has_a_remark_that_says_why():
    rows = [auroc_row("rmd", "a", 0.9), auroc_row("knn", "a", 0.4, high=0.45), auroc_row("msp", "a", 0.45, high=0.55)]
    (remark,) = [note for note in comparison_tables(make_rows(rows))[0].notes if note.startswith("Below chance")]
    assert "KNN on a" in remark
    assert "unit length" in remark


def test_unknown_or_wrong_is_a_table_with_a_sentence_for_the_best_detector():
    assert joint_tables(make_rows(RECORDS)) == []
    records = [*RECORDS, number_row("rmd", "AURC", 0.031)]
    for name, risk in (("rmd", 0.021), ("msp", 0.1)):
        records += [number_row(name, metric, value, "six") for metric, value in (("OSCR", 0.8), ("risk90", risk))]
    (table,) = joint_tables(make_rows(records))
    assert [column.title for column in table.columns] == ["Detector", "OSCR", "AURC", "risk90"]
    assert [cell.text for cell in table.rows[0]][1:] == ["80.00", "3.10", "2.10"]
    assert "2.1 % of the accepted are wrong or unknown" in table.notes[0]
