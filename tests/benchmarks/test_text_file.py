"""Own texts: CSV and JSONL, one file or several, and errors with the line."""

import csv
import json
import pickle

import pytest

from rmd_plugin.benchmarks import DataFormatError, DataNotFoundError, TextFile

TOPICS = {"money": "pay the bill of", "weather": "will it rain in"}
PLACES = [
    "Oslo",
    "Rome, Italy",
    'the "old" town',
    "Zürich\nSwitzerland",
    "东京",
    "Lima\u2028Peru",
    "Cairo",
    "Bern",
    "Riga",
    "Ulm",
]


def records(split=None, count=10, topics=TOPICS):
    found = []
    for label, start in topics.items():
        for number in range(count):
            row = {"text": f"{start} {PLACES[number % 10]} {number // 10}{split or ''}", "label": label}
            found.append({**row, "split": split} if split else row)
    return found


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def everything():
    ood = [{"text": f"sing about {place}", "label": "", "split": "ood:songs"} for place in PLACES]
    return records("train") + records("val", 2) + records("test", 3) + ood


def texts(split):
    return [text for text, _ in split]


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_a_column_says_the_split_and_any_text_comes_back_as_it_was(tmp_path, ending):
    rows = everything()
    benchmark = TextFile(write(tmp_path / f"a{ending}", rows), near=["songs"])
    assert repr(benchmark) == "TextFile(train=20, val=4, test=6, songs=10)"
    assert (benchmark.class_names, benchmark.distance) == (["money", "weather"], {"songs": "near"})
    for split, key in (
        (benchmark.fit_set(), "train"),
        (benchmark.test_in, "test"),
        (benchmark.test_oods[0], "ood:songs"),
    ):
        assert texts(split) == [row["text"] for row in rows if row["split"] == key]
    assert benchmark.fit_set().labels.tolist() == [0] * 10 + [1] * 10


def test_the_formats_and_layouts_are_the_same_benchmark(tmp_path):
    one = TextFile(write(tmp_path / "a.csv", everything()))
    assert TextFile(write(tmp_path / "a.jsonl", everything())).fingerprint() == one.fingerprint()
    for row in everything():
        key = row["split"].replace("ood:", "ood/")
        path = tmp_path / "all" / f"{key}.csv"
        if not path.exists():
            write(
                path, [{k: v for k, v in r.items() if k != "split"} for r in everything() if r["split"] == row["split"]]
            )
    assert TextFile(tmp_path / "all").fingerprint() == one.fingerprint()
    renamed = [{"query": r["text"], "intent": r["label"], "part": r["split"]} for r in everything()]
    other = TextFile(write(tmp_path / "b.csv", renamed), text="query", label="intent", split="part")
    assert other.fingerprint() == one.fingerprint()
    content = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "c.csv").write_bytes(b"\xef\xbb\xbf" + content)
    assert TextFile(tmp_path / "c.csv").fingerprint() == one.fingerprint()


def test_one_file_without_splits_is_split_by_seed(tmp_path):
    path = write(tmp_path / "a.csv", records(count=20))
    benchmark = TextFile(path)
    assert repr(benchmark) == "TextFile(train=28, val=4, test=8)"
    parts = [set(texts(split)) for split in (benchmark.fit_set(), benchmark.val_set(), benchmark.test_in)]
    assert set().union(*parts) == {row["text"] for row in records(count=20)}
    assert sum(map(len, parts)) == 40
    assert TextFile(path, seed=1).fingerprint() != benchmark.fingerprint() == TextFile(path).fingerprint()


def test_numbers_are_ordered_as_numbers_and_negative_ones_are_ood(tmp_path):
    rows = [{"text": f"text {i}", "label": label} for label in (10, 9, -1) for i in range(10)]
    for path in (write(tmp_path / "a.jsonl", rows), write(tmp_path / "a.csv", rows)):
        benchmark = TextFile(path)
        assert benchmark.class_names == ["9", "10"]
        assert repr(benchmark) == "TextFile(train=14, val=2, test=4, ood=10)"
    padded = [{**row, "label": f"{row['label']:03}"} for row in rows[:20]]
    assert TextFile(write(tmp_path / "b.csv", padded)).class_names == ["009", "010"]


def test_texts_are_pickled_for_workers(tmp_path):
    split = TextFile(write(tmp_path / "a.csv", records())).fit_set()
    assert texts(pickle.loads(pickle.dumps(split))) == texts(split)


GOOD = '{"text": "a", "label": "x"}\n'


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", "text,label\na,x\n,x\n", r"line 3: 'text' is empty; a text is expected"),
        ("a.csv", 'text,label\n"a\nb",x\n  ,x\n', r"line 4: 'text' is '  '; a text"),
        ("a.csv", "text,label\na,x\nb,\n", r"line 3: 'label' is empty; a text or a whole number"),
        ("a.csv", "text,label\na,x\nb\n", r"line 3 has 1 cells, 2 are expected: text, label"),
        ("a.csv", "query,label\na,x\n", r"line 2: there is no 'text'; there is query, label"),
        ("a.csv", "text\na\n", r"line 2: 'label' is missing"),
        ("a.csv", 'text,label\n"a,x\n', r"line 2 is not CSV: unexpected end of data"),
        ("a.csv", "text,label,split\na,x,dev\n", r"line 2: the split is 'dev'; train, val, test"),
        ("a.csv", "text,label\n", "has no rows"),
        ("a.csv", "", "has no rows"),
        ("a.csv", "text,label\n" + "a" * 200_000 + ",x\n", r"line 2 is not CSV: field larger than field limit"),
        ("a.csv", "text,label,split\na,x,train\nb,y,test\n", r"1 classes .* not in train: 'y'"),
        ("a.jsonl", GOOD + '{"text": 3, "label": "x"}', "line 2: 'text' is 3; a text is expected"),
        ("a.jsonl", GOOD + '\n{"text": null, "label": "x"}', "line 3: 'text' is missing"),
        ("a.jsonl", GOOD + '{"text": "b", "label": 1.5}', "line 2: 'label' is 1.5; a text or a whole number"),
        ("a.jsonl", GOOD + '{"text": "b", "label": true}', "line 2: 'label' is True"),
        ("a.jsonl", GOOD + '{"text": "b"}', "line 2: 'label' is missing"),
        ("a.jsonl", GOOD + '{"label": "x"}', "line 2: there is no 'text'; there is label"),
        ("a.jsonl", GOOD + "[1]", "line 2 must be an object, it is list"),
        ("a.jsonl", GOOD + "{text}", "line 2 is not JSON"),
        ("a.jsonl", GOOD + '{"text": "a", "text": "b"}', "line 2 is not JSON: an object holds the same key twice"),
        ("a.jsonl", GOOD + '{"text": NaN}', "line 2 is not JSON: the constant NaN"),
        ("a.jsonl", GOOD + "[" * 100_000, "line 2 is not JSON: nested too deeply"),
        ("a.txt", "a", r"read from \.csv or \.jsonl files"),
    ],
)
def test_wrong_files_are_refused_with_the_line(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataFormatError, match=reason) as caught:
        TextFile(tmp_path / name)
    assert caught.value.path == tmp_path / name


def test_a_misspelt_column_of_splits_is_refused(tmp_path):
    with pytest.raises(DataFormatError, match="line 2: there is no 'fold' for the split"):
        TextFile(write(tmp_path / "a.csv", everything()), split="fold")


def test_folders_without_training_texts_and_absent_files_are_refused(tmp_path):
    (tmp_path / "all").mkdir()
    with pytest.raises(DataFormatError, match=r"has no train\.csv or train\.jsonl"):
        TextFile(tmp_path / "all")
    write(tmp_path / "all" / "train.csv", records())
    write(tmp_path / "all" / "train.jsonl", records())
    with pytest.raises(DataFormatError, match=r"two files for train: train\.csv and train\.jsonl"):
        TextFile(tmp_path / "all")
    with pytest.raises(DataNotFoundError, match=r"no file or folder of texts: .*nowhere.*Pass path=FILE \(\.csv or"):
        TextFile(tmp_path / "nowhere.csv")


def test_a_large_file_is_refused_until_it_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("rmd_plugin.benchmarks.readers.records._MAX_BYTES", 100)
    path = write(tmp_path / "a.csv", records())
    with pytest.raises(DataFormatError, match="RMD_MAX_GIB=1"):
        TextFile(path)
    monkeypatch.setenv("RMD_MAX_GIB", "1")
    assert len(TextFile(path).test_in) == 4
