"""Who leads whom, against orders that are read off by eye."""

import math

import pytest

from rmd_plugin.paper.document import order_table, reproduction_document
from rmd_plugin.paper.order import order, rankings, smallest_lead
from rmd_plugin.paper.result import PaperNumber
from rmd_plugin.report.table import to_markdown


def numbers(what, paper, ours=(math.nan,) * 3, setting=""):
    names = ("MD", "RMD", "MSP")
    return [
        PaperNumber(what, f"AUROC of {name}", one, other, setting=setting)
        for name, one, other in zip(names, paper, ours, strict=True)
    ]


#: the first line of table 1; the same lead with other numbers; another order; nothing of ours
SAME = numbers("same", (74.91, 81.01, 80.14), (60.0, 70.0, 69.5), "net")
OTHER = numbers("other", (74.91, 81.01, 80.14), (60.0, 70.0, 70.5), "net")
NOT_RUN = numbers("not run", (97.92, 97.62, 96.99))


def test_the_best_comes_first_and_equal_numbers_are_said_to_be_equal():
    assert order({"MD": 1.0, "RMD": 3.0, "MSP": 2.0}) == "RMD > MSP > MD"
    assert order({"MD": 3.0, "RMD": 3.001, "MSP": 2.0}) == "MD = RMD > MSP"  # both are printed as 3.00
    assert order({"MD": 1.0}) == "MD"


@pytest.mark.parametrize(("items", "same"), [(SAME, True), (OTHER, False), (NOT_RUN, None)])
def test_only_the_order_counts_not_the_level(items, same):
    (found,) = rankings(items)
    assert found.same is same


def test_what_only_one_side_has_does_not_count():
    accuracy = PaperNumber("same", "accuracy", math.nan, 45.0, setting="net")
    ours_alone = PaperNumber("same", "AUROC of KNN", math.nan, 99.0, setting="net")
    without_md = [PaperNumber("same", "AUROC of MD", 90.0, setting="net"), *SAME[1:]]
    assert rankings([*SAME, accuracy, ours_alone]) == rankings(SAME)
    (found,) = rankings(without_md)  # MD would lead in the paper, but was not run
    assert (list(found.paper), list(found.ours), found.same) == (["RMD", "MSP"], ["RMD", "MSP"], True)
    assert rankings(SAME[:1]) == []


def test_the_smallest_lead_is_that_of_neighbours():
    assert smallest_lead({"a": 70.0, "b": 60.0, "c": 69.5}) == pytest.approx(0.5)
    assert math.isnan(smallest_lead({"a": 70.0}))


def test_each_setting_has_a_line_that_says_yes_or_no():
    text = to_markdown(order_table([*SAME, *OTHER, *NOT_RUN])).replace("\\>", ">")
    assert "| same | RMD > MSP > MD | RMD > MSP > MD | yes | 0.87 | 0.50 |" in text
    assert "| other | RMD > MSP > MD | MSP > RMD > MD | **no** | 0.87 | 0.50 |" in text
    assert "| not run | MD > RMD > MSP | not run |  | 0.30 |  |" in text
    assert order_table([]) is None


def test_the_document_counts_the_lines_of_the_tables_that_have_the_order_of_the_paper():
    from test_results import make_summary

    table = make_summary(comparisons=[*SAME, *OTHER, *NOT_RUN])
    figure = make_summary(study="flows", comparisons=SAME)  # the same numbers again: not counted twice
    text = reproduction_document([table, figure], {})
    assert "Of the 3 lines of the tables, 2 were run here, and 1 of them have the methods in the order" in text
    assert text.count("Who leads whom:") == 2
