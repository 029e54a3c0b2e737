"""What is scored: each kind of place gives its items in order, and what is wrong with it is said."""

import json
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from score_kit import colour_picture, photos

from rmd_plugin.guard.inputs import Inputs
from rmd_plugin.untrusted import DataFormatError


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def names(*places, kind="images", **options):
    return [item.name for item in Inputs(places, kind, **options)]


def raws(*places, kind="texts", **options):
    return [item.raw for item in Inputs(places, kind, **options)]


def write_texts(path, rows, **more):
    pq.write_table(pa.table({"text": rows, **more}), path, row_group_size=2)


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_a_folder_gives_its_pictures_in_the_order_of_their_names(tmp_path):
    photos(tmp_path / "new")
    found = names("new/")
    assert found == [
        *("new/blue/0.png", "new/blue/1.png", "new/cut.jpg", "new/green/0.png", "new/green/1.png"),
        *("new/red/0.png", "new/red/1.png", "new/white.png"),
    ]
    assert Inputs(["new"], "images").count() == len(found)


def test_what_is_no_picture_is_counted_and_named(tmp_path):
    photos(tmp_path / "new")
    for number in range(5):
        (tmp_path / "new" / f"z{number}.dat").touch()
    inputs = Inputs(["new"], "images")
    inputs.count()
    inputs.count()  # a second walk does not count twice
    assert inputs.left_out() == ["new: 6 files are no pictures by their ending: notes.txt, z0.dat, z1.dat, ..."]


def test_links_that_leave_the_folder_are_not_followed_and_loops_end(tmp_path):
    photos(tmp_path / "new")
    colour_picture(tmp_path / "secret" / "s.png", (1, 2, 3))
    (tmp_path / "new" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "new" / "s.png").symlink_to(tmp_path / "secret" / "s.png")
    (tmp_path / "new" / "loop").symlink_to(tmp_path / "new")
    (tmp_path / "new" / "same.png").symlink_to(tmp_path / "new" / "white.png")
    inputs = Inputs(["new"], "images")
    found = [item.name for item in inputs]
    assert "new/same.png" in found
    assert not any("out" in name or name.endswith("s.png") or "loop" in name for name in found)
    assert "new: 2 links lead out of the folder and are not followed: out, s.png" in inputs.left_out()


def test_the_folder_itself_may_be_a_link(tmp_path):
    photos(tmp_path / "new")
    (tmp_path / "link").symlink_to("new")
    assert len(names("link")) == len(names("new"))


@pytest.mark.slow
def test_folders_may_nest_deeper_than_python_calls(tmp_path):
    here = os.getcwd()
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    colour_picture(tmp_path.__class__("a.png"), (1, 1, 1))
    os.chdir(here)
    try:
        assert len(names("d")) == 1
    finally:
        os.system("rm -rf d")  # shutil cannot remove it either


def test_a_folder_that_cannot_be_read_is_an_item_with_its_reason(tmp_path, monkeypatch):
    photos(tmp_path / "new")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("green"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = {item.name: item.reason for item in Inputs(["new"], "images")}
    assert found["new/green"] == "the folder cannot be read: Permission denied"
    assert "new/red/1.png" in found


def test_lists_and_tables_name_paths_relative_to_their_folder(tmp_path):
    photos(tmp_path / "new")
    (tmp_path / "new" / "list.txt").write_text("red/0.png\n\nblue/../white.png\r\nmissing.png\n")
    (tmp_path / "new" / "list.csv").write_text('label,path\na,red/0.png\nb,"white.png"\nc\n', encoding="utf-8-sig")
    assert names("new/list.txt") == ["new/red/0.png", "new/blue/../white.png", "new/missing.png"]
    items = list(Inputs(["new/list.csv"], "images"))
    assert [item.name for item in items] == ["new/red/0.png", "new/white.png", "new/list.csv:2"]
    assert items[2].reason == "has no path"


@pytest.mark.parametrize("path", ["/etc/x.png", "../x.png", "a/../../x.png", "..", "out/x.png", "a\0b.png"])
@pytest.mark.parametrize("kind", ["txt", "csv"])
def test_a_path_that_leaves_the_folder_of_its_list_is_refused_with_its_line(tmp_path, path, kind):
    folder = tmp_path / "lists"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    header = "path\n" if kind == "csv" else "good.png\n"
    (folder / f"list.{kind}").write_text(f"{header}{path}\n")
    with pytest.raises(DataFormatError, match="line 2"):
        Inputs([f"lists/list.{kind}"], "images").count()


def test_several_places_come_one_after_the_other(tmp_path):
    photos(tmp_path / "new")
    assert names("new/white.png", "new/red") == ["new/white.png", "new/red/0.png", "new/red/1.png"]


def test_a_name_that_is_no_utf8_has_a_row_that_is(tmp_path):
    (tmp_path / "new").mkdir()
    path = os.fsencode(tmp_path / "new") + b"/caf\xe9.png"
    with open(path, "wb"):
        pass
    (item,) = Inputs(["new"], "images")
    assert item.name == "new/caf\\udce9.png"
    assert os.fsencode(item.raw) == b"new/caf\xe9.png"


# -- texts ------------------------------------------------------------------------------------------------------------


def test_texts_of_csv_jsonl_and_parquet_are_the_same(tmp_path):
    texts = ["one, two", 'with "quotes"\nand lines', "grüße 猫"]
    (tmp_path / "a.csv").write_text(
        'id,text\n1,"one, two"\n2,"with ""quotes""\nand lines"\n3,grüße 猫\n', encoding="utf-8"
    )
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    write_texts(tmp_path / "a.parquet", texts)
    for ending in ("csv", "jsonl", "parquet"):
        assert raws(f"a.{ending}") == texts
        assert names(f"a.{ending}", kind="texts") == [f"a.{ending}:{row}" for row in range(3)]
        assert Inputs([f"a.{ending}"], "texts").count() == 3


def test_columns_are_found_by_the_names_given(tmp_path):
    (tmp_path / "a.csv").write_text("key,q\nx,hello\n,again\n")
    (tmp_path / "a.jsonl").write_text('{"key": 7, "q": "hello"}\n')
    write_texts(tmp_path / "a.parquet", ["no"], q=["hello"], key=["z"])
    assert names("a.csv", kind="texts", text="q", id="key") == ["x", "a.csv:1"]
    assert names("a.jsonl", kind="texts", text="q", id="key") == ["7"]
    assert raws("a.parquet", text="q", id="key") == ["hello"]
    assert names("a.parquet", kind="texts", text="q", id="key") == ["z"]


def test_rows_without_a_text_have_a_reason(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'text,b\ngood,1\n"",2\n\xff\xfe,3\n')
    lines = ['{"text": "good"}', "{", '{"body": 1}', '{"text": 3}', '{"text": "\\ud800"}', "[" * 100_000, "3"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    write_texts(tmp_path / "a.parquet", ["good", None])
    reasons = [item.reason for item in Inputs(["a.csv", "a.jsonl", "a.parquet"], "texts")]
    assert reasons[:3] == [None, "has no text", "the text is not in UTF-8"]
    assert reasons[3] is None
    assert reasons[4].startswith("is not JSON: ")
    assert reasons[5] == "has no 'text': it holds the keys body. Name the texts by text=KEY"
    assert reasons[6] == "holds a int in place of a text"
    assert reasons[7] == "the text is not in UTF-8"
    assert reasons[8] == "is not JSON of ours: nested too deeply"
    assert reasons[9] == "has no 'text': it holds no object. Name the texts by text=KEY"
    assert reasons[10:] == [None, "has no text"]


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rmd_plugin.guard.line_files._LONGEST_LINE", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + "x" * 1000)
    with pytest.raises(DataFormatError, match="line 2 is longer than 100 letters"):
        Inputs(["a.jsonl"], "texts").count()


def test_a_csv_that_is_none_is_refused_with_its_line(tmp_path):
    (tmp_path / "a.csv").write_text('text\ngood\n"bad" x\n')
    with pytest.raises(DataFormatError, match="line 3 is not CSV"):
        Inputs(["a.csv"], "texts").count()


# -- features ---------------------------------------------------------------------------------------------------------


def test_features_of_parquet_and_npy_are_the_same(tmp_path):
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.save("a.npy", rows)
    flat = pa.array(rows.ravel())
    for name, column in {
        "list": pa.array(list(rows), pa.list_(pa.float32())),
        "large": pa.array(list(rows), pa.large_list(pa.float32())),
        "fixed": pa.FixedSizeListArray.from_arrays(flat, 3),
    }.items():
        pq.write_table(pa.table({"embedding": column}), f"{name}.parquet", row_group_size=2)
        np.testing.assert_array_equal(raws(f"{name}.parquet", kind="features"), rows)
    np.testing.assert_array_equal(raws("a.npy", kind="features"), rows)
    assert names("a.npy", kind="features")[4] == "a.npy:4"


def test_a_folder_of_parquet_files_is_one_table(tmp_path):
    for name in ("b/2.parquet", "a.parquet", "b/1.parquet", "_meta.parquet", ".hidden.parquet"):
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"embedding": [[1.0, 2.0]], "key": [name]}), tmp_path / "t" / name)
    assert names("t", kind="features", id="key") == ["a.parquet", "b/1.parquet", "b/2.parquet"]
    assert names("t", kind="features") == ["t/a.parquet:0", "t/b/1.parquet:0", "t/b/2.parquet:0"]


def test_one_damaged_file_of_a_folder_is_an_item_with_its_reason(tmp_path):
    (tmp_path / "t").mkdir()
    for name in "ac":
        pq.write_table(pa.table({"embedding": [[1.0], None]}), tmp_path / "t" / f"{name}.parquet")
    (tmp_path / "t" / "b.parquet").write_bytes((tmp_path / "t" / "a.parquet").read_bytes()[:-20])
    inputs = Inputs(["t"], "features")
    found = list(inputs)
    assert inputs.count() == len(found) == 5
    assert found[1].reason == "holds null in place of numbers"
    assert found[2].reason.startswith("cannot be read as Parquet: ")
    with pytest.raises(DataFormatError, match=r"b\.parquet: cannot be read as Parquet"):
        Inputs(["t/b.parquet"], "features").count()


def test_rows_of_a_map_go_to_workers_as_small_arrays(tmp_path):
    np.save("a.npy", np.zeros((10_000, 4), dtype=np.float32))
    item = next(iter(Inputs(["a.npy"], "features")))
    assert len(pickle.dumps(item)) < 1000


def test_python_objects_are_not_unpickled(tmp_path):
    np.save("a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataFormatError, match="would have to be unpickled"):
        Inputs(["a.npy"], "features")


# -- what does not fit ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_the_guard_is_one_sentence(tmp_path):
    for name in ("a.csv", "a.txt", "a.parquet", "a.zip", "a.png", "a.npy"):
        (tmp_path / name).write_text("label\n")
    (tmp_path / "empty").mkdir()
    for kind, place, words in [
        ("images", "a.parquet", "a.parquet cannot be scored: the guard judges images and takes a folder of pictures"),
        ("images", "a.csv", "has no column 'path'; its first line names 'label'"),
        ("images", "gone", "there is no gone"),
        ("texts", "a.txt", "the guard judges texts and takes a CSV, JSONL or Parquet file"),
        ("texts", "a.csv", "has no column 'text'; its first line names 'label'"),
        ("texts", "a.png", "a.png cannot be scored"),
        ("texts", "empty", "empty holds no .parquet file"),
        ("features", "a.zip", "takes a Parquet file"),
        ("features", "a.npy", "has no valid npy header"),
    ]:
        with pytest.raises((ValueError, OSError), match=words.replace("(", r"\(")):
            Inputs([place], kind).count()


def test_a_column_that_is_not_there_or_of_another_type_is_named_with_those_that_are(tmp_path):
    pq.write_table(pa.table({"vector": [[1.0]], "name": ["x"]}), "a.parquet")
    with pytest.raises(ValueError, match=r"no column 'embedding'; it has 'vector', 'name'\. Name it by features="):
        Inputs(["a.parquet"], "features").count()
    with pytest.raises(ValueError, match="column 'name' holds string, lists of numbers are expected"):
        Inputs(["a.parquet"], "features", features="name").count()
    with pytest.raises(ValueError, match=r"column 'vector' holds list<.*>, texts are expected"):
        Inputs(["a.parquet"], "texts", text="vector").count()


def test_an_option_of_another_kind_is_refused(tmp_path):
    for kind, options in {"images": {"text": "q"}, "texts": {"features": "v"}, "features": {"text": "q"}}.items():
        with pytest.raises(ValueError, match=f"this one judges {kind}"):
            Inputs(["."], kind, **options)
    with pytest.raises(ValueError, match="pictures are named by their paths"):
        Inputs(["."], "images", id="key")


def test_raw_items_are_found_by_name_unless_two_share_it(tmp_path):
    (tmp_path / "a.csv").write_text("key,text\nx,one\ny,two\nx,three\n")
    assert Inputs(["a.csv"], "texts", id="key").find({"x", "y", "z"}) == {"y": "two"}
