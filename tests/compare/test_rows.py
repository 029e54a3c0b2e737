import dataclasses
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmd_plugin.compare.rows import COLUMNS, Row, RowsError, read_rows, select, unique, write_rows

ROW = Row("digits", "noise", "small_cnn", "rmd", 0, "AUROC", 0.1 + 0.2, distance="far", low=0.25, high=1 / 3)

# csv keeps everything but NUL and lone surrogates, which no file can hold
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
numbers = st.floats(allow_nan=True)
some_rows = st.lists(
    st.builds(
        Row,
        texts,
        texts,
        texts,
        texts,
        st.integers(-(2**63), 2**63),
        texts,
        numbers,
        distance=st.sampled_from(["", "near", "far"]),
        low=numbers,
        high=numbers,
        status=st.sampled_from(["ok", "failed", "skipped"]),
        reason=texts,
    ),
    max_size=5,
)


def same(one: Row, other: Row) -> bool:
    pairs = zip(dataclasses.astuple(one), dataclasses.astuple(other), strict=True)
    return all(a == b or (a != a and b != b) for a, b in pairs)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("rows") / "rows.csv"


@pytest.mark.slow
@given(rows=some_rows)
def test_every_row_comes_back_from_csv_to_the_last_bit(rows, path):
    write_rows(rows, path)
    back = read_rows(path)
    assert len(back) == len(rows)
    assert all(same(a, b) for a, b in zip(rows, back, strict=True))
    assert len(path.read_bytes().splitlines()) == len(rows) + 1


def test_the_first_seven_columns_are_those_of_the_house_style():
    assert COLUMNS[:7] == ("benchmark", "ood", "backbone", "detector", "seed", "metric", "value")


def test_a_failed_row_has_no_number_and_a_reason_on_one_line():
    row = ROW.failed("broken\n  because of this")
    assert math.isnan(row.value)
    assert math.isnan(row.low)
    assert not row.ok
    assert row.reason == "broken because of this"


def test_an_unknown_distance_or_status_is_refused():
    with pytest.raises(ValueError, match=r"distance must be one of '', 'near', 'far', 'shift', got 'medium'"):
        dataclasses.replace(ROW, distance="medium")
    with pytest.raises(ValueError, match="status must be one of"):
        dataclasses.replace(ROW, status="maybe")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "lacks the columns benchmark, ood"),
        ("", "lacks the columns"),
        ("benchmark,ood,backbone,detector,seed,metric,value\nd,o,b,x,zero,AUROC,0.5\n", "line 2: invalid literal"),
        ("benchmark,ood,backbone,detector,seed,metric,value\nd,o,b,x,0,AUROC,much\n", "line 2: could not convert"),
        ("benchmark,ood,backbone,detector,seed,metric,value\nd,o,b,x,0\n", "line 2: the line ends early"),
        ('benchmark,ood,backbone,detector,seed,metric,value\n"d,o,b,x,0,AUROC,1\n', "not valid CSV"),
    ],
)
def test_a_file_without_rows_is_refused_with_file_line_and_reason(text, complaint, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(RowsError, match=complaint) as caught:
        read_rows(path)
    assert str(path) in str(caught.value)


def test_a_binary_file_is_refused_with_the_place(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"benchmark\xff\xfe")
    with pytest.raises(RowsError, match="byte 9"):
        read_rows(path)


def test_further_columns_are_ignored_and_optional_ones_may_be_missing(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("benchmark,ood,backbone,detector,seed,metric,value,colour\nd,o,b,x,3,AUROC,0.5,red\n")
    assert same(read_rows(path)[0], Row("d", "o", "b", "x", 3, "AUROC", 0.5))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows([ROW], path)

    def rows():
        yield ROW
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_rows(rows(), path)
    assert os.listdir(tmp_path) == ["rows.csv"]
    assert same(read_rows(path)[0], ROW)


def test_select_and_unique_keep_the_order_of_first_appearance():
    rows = [dataclasses.replace(ROW, detector=name) for name in ("b", "a", "", "b")]
    assert unique(rows, "detector") == ["b", "a"]
    assert len(select(rows, detector="b", metric="AUROC")) == 2
