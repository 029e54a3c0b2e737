"""Own pictures: folders as torchvision reads them, tables, splits, bad files, and the commands on them."""

import csv
import logging
import os
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder as Reference

from rmd_plugin.benchmarks import DataFormatError, DataNotFoundError, ImageFolder
from rmd_plugin.untrusted import LIMIT_VARIABLE

COLOURS = {"blue": (30, 30, 220), "green": (30, 220, 30), "red": (220, 30, 30)}


def draw(path, colour, seed=0, size=(12, 10)):
    noise = np.random.default_rng(seed).integers(-30, 30, (*size, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8)).save(path)


def fill(folder, per_class=5, colours=COLOURS):
    for name, colour in colours.items():
        for number in range(per_class):
            draw(folder / name / f"{number:03}.png", colour, seed=number + 1000 * len(folder.name))
    return folder


@pytest.fixture
def photos(tmp_path):
    """Three colours to train and test on, yellow and noise to find."""
    root = tmp_path / "photos"
    fill(root / "train", 10)
    fill(root / "test", 4)
    fill(root / "ood", 6, {"yellow": (220, 220, 30), "grey": (128, 128, 128)})
    return root


def pixels(split):
    return [np.asarray(item).tobytes() for item, _ in split]


def test_folders_are_read_as_torchvision_reads_them(photos):
    # folders below a class, endings in capitals, files of other kinds, names whose order as text is not that of numbers
    draw(photos / "train" / "red" / "more" / "a.PNG", COLOURS["red"])
    draw(photos / "train" / "red" / "more-a" / "a.jpg", COLOURS["red"], seed=1)
    draw(photos / "train" / "10" / "a.webp", (9, 9, 9))
    draw(photos / "train" / "9" / "a.bmp", (9, 9, 9))
    (photos / "train" / "red" / "notes.txt").write_text("x")
    reference = Reference(str(photos / "train"))
    benchmark = ImageFolder(photos, val_fraction=0)
    assert benchmark.class_names == reference.classes == ["10", "9", "blue", "green", "red"]
    assert benchmark.fit_set().source.items == [path for path, _ in reference.samples]
    for (image, label), (expected, target) in zip(benchmark.fit_set(), reference, strict=True):
        assert label == target
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def test_given_splits_are_used_and_missing_ones_are_held_out_by_seed(photos):
    given = ImageFolder(photos)
    assert repr(given) == "ImageFolder(train=27, val=3, test=12, grey=6, yellow=6)"
    assert np.bincount(given.val_set().labels).tolist() == [1, 1, 1]
    fill(photos / "val", 2)
    assert repr(ImageFolder(photos)) == "ImageFolder(train=30, val=6, test=12, grey=6, yellow=6)"
    shutil.rmtree(photos / "test")
    alone = ImageFolder(photos)
    assert repr(alone) == "ImageFolder(train=24, val=6, test=6, grey=6, yellow=6)"
    shutil.rmtree(photos / "val")
    both = ImageFolder(photos, test_fraction=0.3)
    assert repr(both) == "ImageFolder(train=18, val=3, test=9, grey=6, yellow=6)"
    parts = [pixels(split) for split in (both.fit_set(), both.val_set(), both.test_in)]
    assert len(set().union(*parts)) == 30  # no picture in two of them
    again, other = ImageFolder(photos, test_fraction=0.3), ImageFolder(photos, test_fraction=0.3, seed=1)
    assert both.fingerprint() == again.fingerprint() != other.fingerprint()


def test_ood_sets_are_optional_and_their_distance_is_what_the_user_says(photos):
    assert ImageFolder(photos).distance == {"grey": "", "yellow": ""}
    benchmark = ImageFolder(photos, near=["yellow"], far=["grey"])
    assert (benchmark.ood_names, benchmark.distance) == (["yellow", "grey"], {"yellow": "near", "grey": "far"})
    assert {label for _, label in benchmark.test_oods[0]} == {-1}
    with pytest.raises(ValueError, match=r"yelow is none of them\. There are: grey, yellow\."):
        ImageFolder(photos, near=["yelow"])
    with pytest.raises(ValueError, match="grey stands in both"):
        ImageFolder(photos, near=["grey"], far=["grey"])
    shutil.rmtree(photos / "ood")
    none = ImageFolder(photos)
    assert (none.ood_names, none.test_sets(), len(none.test_sets(unknown=False))) == ([], [], 1)


def test_a_class_that_is_not_trained_on_is_refused_with_the_remedy(photos):
    draw(photos / "test" / "pink" / "a.png", (255, 100, 200))
    with pytest.raises(
        DataFormatError, match=r"1 classes that are not in train: 'pink'\. .* OOD set \(ood\)"
    ) as caught:
        ImageFolder(photos)
    assert caught.value.path == photos / "test"


def test_hidden_files_and_links_that_lead_back_are_no_data(photos):
    expected = ImageFolder(photos).fingerprint()
    draw(photos / "train" / ".ipynb_checkpoints" / "a.png", (0, 0, 0))
    (photos / "train" / "red" / "._000.png").write_bytes(b"of a file system")
    (photos / "train" / "red" / "loop").symlink_to(photos / "train" / "red")
    assert ImageFolder(photos).fingerprint() == expected


def test_a_linked_folder_is_followed(photos, tmp_path):
    shutil.move(photos / "train" / "red", tmp_path / "elsewhere")
    (photos / "train" / "red").symlink_to(tmp_path / "elsewhere")
    assert ImageFolder(photos).class_names == ["blue", "green", "red"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda root: shutil.rmtree(root / "train"), r"photos: has no folder train; expected is train/CLASS"),
        (lambda root: (root / "train" / "empty").mkdir(), r"train: the folder 'empty' holds no picture; .*\.webp"),
        (
            lambda root: draw(root / "train" / "a.png", (0, 0, 0)),
            r"train: holds pictures that lie in no folder .*a\.png",
        ),
        (
            lambda root: draw(root / "ood" / "a.png", (0, 0, 0)),
            r"ood: holds pictures that lie in no folder of their own",
        ),
        (lambda root: fill(root / "ood", 1, {"test": (0, 0, 0)}), "an OOD set cannot be named 'test'"),
        (lambda root: shutil.rmtree(root / "train") or (root / "train").mkdir(), "train: holds no folders"),
    ],
)
def test_other_layouts_are_refused_with_what_was_expected(photos, change, reason):
    change(photos)
    with pytest.raises(ValueError, match=reason):
        ImageFolder(photos)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"on_bad": "ignore"}, "on_bad must be refuse or skip, got 'ignore'"),
        ({"test_fraction": 0.0}, "test_fraction must lie above 0"),
        ({"val_fraction": 1.0}, "val_fraction in"),
        ({"limit_train": 2}, "cannot cover the 3 classes"),
    ],
)
def test_wrong_options_are_refused(photos, options, reason):
    with pytest.raises(ValueError, match=reason):
        ImageFolder(photos, **options)


def test_a_path_is_looked_for_here_and_in_the_data_folder(photos, monkeypatch):
    monkeypatch.delenv("RMD_DATA_DIR", raising=False)
    monkeypatch.chdir("/")
    assert ImageFolder("photos", data_dir=photos.parent).path == photos
    with pytest.raises(
        DataNotFoundError, match=r"no folder or CSV of pictures: looked for nowhere; .*nowhere\. Pass path=FOLDER"
    ):
        ImageFolder("nowhere", data_dir=photos.parent)
    with pytest.raises(DataNotFoundError, match="RMD_DATA_DIR is not set"):
        ImageFolder("nowhere")


# bad pictures


@pytest.fixture
def spoilt(photos):
    """Seven pictures that cannot be read, of different kinds."""
    red = photos / "train" / "red"
    for number in range(3):
        content = (red / f"{number:03}.png").read_bytes()
        (red / f"{number:03}.png").write_bytes(content[: len(content) // 2])
    (red / "empty.jpg").touch()
    (photos / "test" / "blue" / "text.png").write_text("no picture")
    (photos / "ood" / "grey" / "gone.png").symlink_to(photos / "nowhere.png")
    os.mkfifo(photos / "ood" / "grey" / "pipe.png")
    return photos


def test_bad_pictures_are_listed_and_refused_before_anything_starts(spoilt):
    with pytest.raises(DataFormatError) as caught:
        ImageFolder(spoilt)
    message = str(caught.value)
    assert "7 of 58 pictures cannot be read" in message
    assert f"{spoilt / 'train' / 'red' / '000.png'}: is not a readable picture: " in message
    assert message.count(";") >= 5
    assert message.endswith("; .... on_bad=skip leaves them out")


def test_bad_pictures_are_left_out_and_listed_if_that_is_asked_for(spoilt, caplog):
    with caplog.at_level(logging.WARNING):
        benchmark = ImageFolder(spoilt, on_bad="skip", val_fraction=0)
    (record,) = [record for record in caplog.records if "left out" in record.getMessage()]
    assert "7 of 58 pictures cannot be read and are left out" in record.getMessage()
    assert repr(benchmark) == "ImageFolder(train=27, val=0, test=12, grey=6, yellow=6)"
    for split in (benchmark.fit_set(), benchmark.test_in, *benchmark.test_oods):
        assert all(image.mode == "RGB" for image, _ in split)


def test_a_class_or_set_without_a_readable_picture_is_refused_even_then(photos):
    for path in (photos / "train" / "red").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataFormatError, match="no picture of the class 'red' can be read"):
        ImageFolder(photos, on_bad="skip")
    fill(photos / "train")
    shutil.rmtree(photos / "train" / "red")
    shutil.rmtree(photos / "test" / "red")
    for path in (photos / "ood" / "grey").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataFormatError, match="no picture of ood:grey can be read"):
        ImageFolder(photos, on_bad="skip")


@pytest.mark.slow
def test_a_picture_that_is_too_large_can_be_allowed_by_one_variable(photos, monkeypatch):
    Image.new("1", (9_500, 9_500)).save(photos / "train" / "red" / "large.png")
    with pytest.raises(DataFormatError, match=f"{LIMIT_VARIABLE}=1"):
        ImageFolder(photos)
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    assert len(ImageFolder(photos, val_fraction=0).fit_set()) == 31


# tables


def write_table(path, rows, header=("path", "label", "split")):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def as_table(photos):
    rows = []
    for path in sorted(photos.rglob("*.png")):
        split, name, _ = path.relative_to(photos).parts
        rows.append((path.relative_to(photos), name, f"ood:{name}" if split == "ood" else split))
    return rows


def test_a_table_and_folders_of_the_same_pictures_are_the_same_benchmark(photos):
    rows = as_table(photos)
    table = ImageFolder(write_table(photos / "all.csv", rows))
    assert table.fingerprint() == ImageFolder(photos).fingerprint()
    assert table.class_names == ["blue", "green", "red"]
    # with the mark that some programs put in front, other columns between, and without labels of OOD rows
    text = "\ufeffnote,path,label,split\n"
    text += "".join(
        f'"a, b",{path},{"" if split.startswith("ood") else label},{split}\n' for path, label, split in rows
    )
    (photos / "more.csv").write_text(text, encoding="utf-8")
    assert ImageFolder(photos / "more.csv").fingerprint() == table.fingerprint()


def test_a_table_without_splits_is_split_by_seed_and_numbers_are_ordered_as_numbers(photos):
    labels = {"blue": 10, "green": 9, "red": -1}
    rows = [(f"train/{name}/{number:03}.png", labels[name]) for name in labels for number in range(10)]
    benchmark = ImageFolder(write_table(photos / "a.csv", rows, ("path", "label")))
    assert benchmark.class_names == ["9", "10"]
    assert repr(benchmark) == "ImageFolder(train=14, val=2, test=4, ood=10)"
    (red,) = benchmark.test_oods
    assert pixels(red) == [
        np.asarray(Image.open(photos / "train" / "red" / f"{n:03}.png")).tobytes() for n in range(10)
    ]


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../secret.png", "train/../../secret.png", "a/../../secret.png", "", "..", "a\0b.png"],
)
def test_a_path_that_leaves_the_folder_of_its_table_is_refused(photos, path):
    draw(photos.parent / "secret.png", (0, 0, 0))
    rows = [("train/red/000.png", "red", "train"), (path, "red", "train")]
    with pytest.raises(DataFormatError, match=r"line 3: .*(inside of the table's folder|NUL)"):
        ImageFolder(write_table(photos / "a.csv", rows))


def test_a_path_with_dots_that_stays_inside_is_read(photos):
    rows = [(f"train/../train/{name}/./{n:03}.png", name) for name in COLOURS for n in range(10)]
    assert ImageFolder(write_table(photos / "a.csv", rows, ("path", "label"))).num_classes == 3


@pytest.mark.parametrize(
    ("rows", "header", "reason"),
    [
        ([("a.png", "x")], ("file", "label"), r"line 2: there is no 'path'; there is file, label"),
        ([("a.png",)], ("path",), "line 2 has no label"),
        ([("a.png", "x", "dev")], ("path", "label", "split"), r"line 2: the split is 'dev'; train, val, test, ood"),
        ([("a.png", "", "test")], ("path", "label", "split"), "line 2 has no label; only rows of the split ood"),
        ([("a.png", "x", "ood:")], ("path", "label", "split"), "the split is 'ood:'"),
        ([("a.png", "x", "test")], ("path", "label", "split"), "has no training data; it has test"),
        ([("a.png", "x", "train", "y")], ("path", "label", "split"), "line 2 has 4 cells, 3 are expected"),
        ([("a.png", "x", "train")], ("path", "label", "label"), "line 1: two columns have the same name"),
        ([("missing.png", "x", "train")], ("path", "label", "split"), "missing.png.*on_bad=skip"),
        ([], ("path", "label", "split"), "has no training data; it has nothing"),
    ],
)
def test_wrong_tables_are_refused_with_the_line(photos, rows, header, reason):
    draw(photos / "a.png", (0, 0, 0))
    with pytest.raises(DataFormatError, match=reason):
        ImageFolder(write_table(photos / "a.csv", rows, header))


def test_other_files_are_refused(photos):
    (photos / "a.txt").write_text("path,label\n")
    with pytest.raises(DataFormatError, match=r"read from \.csv or \.jsonl"):
        ImageFolder(photos / "a.txt")
    (photos / "a.csv").write_bytes(b"path,label\n\xff\xfe,x\n")
    with pytest.raises(DataFormatError, match="is not a text file in UTF-8"):
        ImageFolder(photos / "a.csv")


# the source


def test_pictures_are_read_on_access_and_pickled_by_their_paths(photos):
    benchmark = ImageFolder(photos)
    split = pickle.loads(pickle.dumps(benchmark.fit_set()))
    assert len(pickle.dumps(split)) < 30 * 12 * 10 * 3  # the pixels
    assert pixels(split) == pixels(benchmark.fit_set())
    before = benchmark.fingerprint()
    draw(photos / "train" / "red" / "000.png", (1, 2, 3))
    assert benchmark.fingerprint() != before
    os.remove(photos / "train" / "red" / "000.png")
    with pytest.raises(FileNotFoundError):
        pixels(benchmark.train_set()), pixels(benchmark.val_set())
