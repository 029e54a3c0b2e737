import pandas as pd
import pytest

from rmd_plugin.compare.rows import COLUMNS, levels, make_row, make_rows, read_rows, select, unique, write_rows

ROWS = make_rows([
    make_row("digits", "noise", "small_cnn", "rmd", 0, "AUROC", 0.1 + 0.2, distance="far", low=0.25, high=1 / 3),
    make_row("NA", 'a,"b" \N{CAT FACE}', "null", "=1+1", 7, "AUROC", status="failed", reason="two\n lines"),
    make_row("digits", "", "small_cnn", "rmd", 0, "false_alarms@0.05", 5e-324, reason="few"),
])  # fmt: skip


def test_rows_come_back_from_csv_to_the_last_bit(tmp_path):
    write_rows(ROWS, tmp_path / "rows.csv")
    pd.testing.assert_frame_equal(read_rows(tmp_path / "rows.csv"), ROWS, check_exact=True)
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()[0] == ",".join(COLUMNS)


def test_no_rows_come_back_with_their_columns(tmp_path):
    write_rows(make_rows(), tmp_path / "rows.csv")
    pd.testing.assert_frame_equal(read_rows(tmp_path / "rows.csv"), make_rows())


@pytest.mark.parametrize("text", ["", "benchmark,value\nb,1\n", ",".join(COLUMNS) + "\nb,x,n,d,seed,AUROC,1,,,,ok,\n"])
def test_another_file_is_refused_by_its_name(text, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.csv"):
        read_rows(tmp_path / "rows.csv")


def test_rows_are_found_by_their_columns():
    assert select(ROWS, detector="rmd", metric="AUROC")["value"].tolist() == [0.1 + 0.2]
    assert unique(ROWS, "ood") == ["noise", 'a,"b" \N{CAT FACE}']
    assert levels(ROWS) == [0.05]
    assert ROWS["reason"].tolist() == ["", "two lines", "few"]
