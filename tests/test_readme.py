"""What README and docs show: Python blocks run in order, and shell lines of the README and of docs/own_data.md run."""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytorch_lightning as pl
import torch
from guard_kit import picture_guard, pictures
from PIL import Image
from pytorch_ood.detector import MaxSoftmax
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, Calibrated

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
OWN_DATA = (ROOT / "docs/own_data.md").read_text()
#: the README's lines that build on each other: they are those of examples/own_images.md
PICTURES = re.compile(r"make_pictures|image_folder|rmd-score")


def blocks(*languages, page=README):
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", page, flags=re.S)


def shell_lines(page=README):
    """The lines of a page's shell blocks, without the installation, which tests/app/test_wheel.py covers."""
    lines = "\n".join(blocks("bash", "sh", page=page)).replace("\\\n", " ").splitlines()
    return [line.split("&&")[-1].strip() if line.startswith("pip install") else line for line in lines if line]


def environment():
    # commands are installed beside python
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def run(line, cwd):
    done = subprocess.run(["bash", "-c", line], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{line}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What a reader of the README has in place already, small."""
    monkeypatch.chdir(tmp_path)

    generator = torch.Generator().manual_seed(0)

    def data(count, label=None):
        y = torch.arange(count) % 3
        x = torch.randn(count, 8, generator=generator) + 3 * nn.functional.one_hot(y, 8)
        return TensorDataset(x, y if label is None else torch.full_like(y, label))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)

        def forward(self, x):
            return self.fc(self.body(x))

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Net()

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("val/acc", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    picture_guard().save("guard", onnx=False)
    Path("photos_new").mkdir()
    Image.fromarray(pictures(1)[0]).save("photos_new/eight_000.png")
    train, model = data(120), Module()
    options = {"max_epochs": 1, "logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    return {
        "Trainer": functools.partial(pl.Trainer, **options, enable_model_summary=False, log_every_n_steps=1),
        "ModelCheckpoint": functools.partial(pl.callbacks.ModelCheckpoint, tmp_path, "best"),
        "model": model,
        "MyModule": Module,
        "train_loader": DataLoader(train, batch_size=10),
        "val_loader": DataLoader(data(30), batch_size=10),
        "svhn_loader": DataLoader(data(30, label=-1), batch_size=10),
        "encoder": model.model.body,
        "x": data(5).tensors[0],
        "z": train.tensors[0],
        "y": train.tensors[1],
        "z_test": data(5).tensors[0],
        "my_shard": [train[:30], train[30:]],
    }


QUIET = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:.*Checkpoint dir",
    "ignore:.*logging interval",
)


def run_blocks(page, names):
    for number, block in enumerate(blocks("python", page=(ROOT / page).read_text())):
        exec(compile(block, f"{page} block {number}", "exec"), names)


@QUIET
def test_the_python_blocks_run_in_order(names, capsys):
    run_blocks("README.md", names)
    known, unknown = map(int, re.findall(r"(\d+)%", capsys.readouterr().out))
    assert known < 10 < 70 < unknown
    assert names["scores"].shape == (5,)
    assert names["rmd"].predict_features(torch.zeros(2, 16)).shape == (2,)


@QUIET
def test_the_python_blocks_of_the_page_on_decisions_run_in_order(names):
    x, y = names["val_loader"].dataset.tensors
    names["held_out_loader"] = [(x + 0.1 * torch.randn(30, 8), y) for _ in range(10)]
    names["batch"], names["classifier"] = names["x"], names["model"].model
    folder = Path("outputs/train/RUN/detectors")
    folder.mkdir(parents=True)
    z, labels = names["train_loader"].dataset.tensors
    for name, detector in {"rmd": RMD().fit_features(names["encoder"](z), labels), "msp": MaxSoftmax(None)}.items():
        Calibrated(detector).calibrate_scores(torch.arange(30.0)).save(folder / f"{name}.safetensors")
    run_blocks("docs/decisions.md", names)
    assert len(names["detector"].calibration) == 300
    assert names["detectors"]["rmd"].is_ood(names["x"]).dtype == torch.bool
    assert torch.isfinite(names["rmd"].predict(names["x"])).all()
    assert (names["msp"].predict(names["x"]) <= 0).all()


def test_the_python_blocks_of_the_page_on_watching_run_in_order(names, capsys):
    z, y = names["z"], names["y"]
    names |= {"z_train": z, "y_train": y, "z_held_out": z + 0.1, "z_confirmed": 3 * z, "stream": (3 * z).split(40)}
    run_blocks("docs/watch.md", names)
    assert "changed since about sample" in capsys.readouterr().out
    assert (names["alarm"].count, names["alarm"].alarm) == (0, False)
    assert names["drift"].count == 1
    (line,) = shell_lines((ROOT / "docs/watch.md").read_text())
    assert "No sign of a change in 1 items" in run(line, Path.cwd())


def test_the_python_blocks_of_the_page_on_detectors_run_in_order(names):
    names["net"] = names["model"].model
    run_blocks("docs/detectors.md", names)
    assert torch.isfinite(names["detector"].predict_features(names["z_test"])).all()


def test_the_readme_is_short_and_its_links_are_absolute():
    assert len(README.splitlines()) <= 150
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    headings = [
        re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-") for line in README.splitlines() if line[:3] == "## "
    ]
    assert [link for link in links if link.startswith("#") and link[1:] not in headings] == []
    ours = [
        re.split("/(?:blob/)?main/", link)[1] for link in links if "rmd-plugin/rmd-plugin/" in link and "main/" in link
    ]
    assert len(ours) > 10
    assert [path for path in ours if not (ROOT / path).is_file()] == []


def test_every_file_that_a_page_links_to_exists():
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()) if "://" not in link]
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name


def test_the_table_of_extras_names_them_all():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs/install.md").read_text()
    table = page[page.index("| extra |") :].split("\n\n")[0]
    first_cells = " ".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(extras)


@pytest.mark.slow
@QUIET
def test_the_way_from_pictures_to_scores_runs_as_the_example_has_it(tmp_path, monkeypatch):
    example = (ROOT / "examples/own_images.md").read_text()
    lines = "".join(blocks("bash", page=example)).splitlines()
    assert lines == [line for line in shell_lines() if PICTURES.search(line)]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for line in lines:
        out = run(line, tmp_path)
    assert "not readable" in out
    monkeypatch.chdir(tmp_path)
    found = {}
    for block in blocks("python", page=example):
        exec(block, found)
    assert found["verdict"].class_name == "three"
    python = found["guard"]("photos_new/eight_000.png")
    assert float(found["score"][0]) == pytest.approx(python.score, rel=1e-3, abs=1e-3)
    assert bool(found["is_ood"][0]) == python.is_ood
    scores = pandas.read_csv("photos_scores/scores.csv").set_index("path")
    assert scores.loc["photos_new/broken.png", "reason"].startswith("photos_new/broken.png: is not a readable picture")
    known = scores.index.str.contains("zero|one|two|three|four|five")
    flagged = scores["is_ood"][scores["reason"].isna()].astype(bool)
    # of 72 and 48 pictures
    assert flagged[known[scores["reason"].isna()]].mean() < 0.25
    assert flagged[~known[scores["reason"].isna()]].mean() > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for line in shell_lines() if not line.startswith("rmd-report") and not PICTURES.search(line)]
)
def test_shell_lines_run(line, tmp_path):
    if line == "pytest":
        return  # that is this run
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    out = run(line, tmp_path)
    assert out
    if " -m " in line:  # the next line of the README gathers what this one made
        assert "rmd-report multirun/train" in shell_lines()
        assert "RMD" in run("rmd-report multirun/train", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "speed").glob("*.py")))
def test_speed_scripts_find_all_that_they_import(script, tmp_path):
    assert "usage" in run(f"{shlex.quote(sys.executable)} {ROOT / 'speed' / script} --help", tmp_path)


@pytest.mark.slow
def test_the_speed_of_an_update_is_measured_at_any_size(tmp_path):
    sizes = "--samples 3000 --width 8 --classes 3 --rows 60 --rounds 1"
    out = run(f"{shlex.quote(sys.executable)} {ROOT / 'speed/update.py'} {sizes}", tmp_path)
    assert re.findall(r"\| `(\w+)` \| [\d.]+ ms vs [\d.]+ s: \*\*\d+x faster", out) == ["update", "forget", "add_class"]


@pytest.mark.slow
def test_the_cost_of_the_monitor_is_measured_at_any_size(tmp_path):
    out = run(f"{shlex.quote(sys.executable)} {ROOT / 'speed/callback.py'} --images 16 --rounds 1", tmp_path)
    assert "growth of the peak RSS" in out
    assert out.count("<=") == 3  # the ratios that the documentation promises


# docs/own_data.md


def make_photos(root):
    """Pictures of three colours, some in a table; yellow ones are OOD."""
    colours = {"blue": (30, 30, 220), "green": (30, 220, 30), "red": (220, 30, 30), "yellow": (220, 220, 30)}
    rng = np.random.default_rng(0)
    rows = ["path,label,split"]
    for split, count in (("train", 40), ("test", 10), ("ood", 10)):
        for name in ["yellow"] if split == "ood" else [*colours][:3]:
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                noise = rng.integers(-30, 30, (32, 32, 3))
                pixels = np.clip(noise + colours[name], 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
                rows.append(f"{split}/{name}/{number}.png,{name},{split}")
    (root / "broken.png").write_bytes(b"no picture")
    (root / "table.csv").write_text("\n".join([*rows, "broken.png,red,train"]))


def make_vectors(folder):
    """Three classes in eight dimensions, in each of the layouts; OOD rows lie between them."""
    rng = np.random.default_rng(0)

    def draw(count, ood=False):
        y = np.arange(count) % 3
        return (rng.normal(size=(count, 8)) + (2 if ood else 6 * np.eye(3, 8)[y])).astype(np.float32), y

    parts = {"train": draw(240), "test": draw(90), "ood:between": draw(60, ood=True)}
    z, y = (np.concatenate([part[i] for part in parts.values()]) for i in (0, 1))
    split = np.repeat([*parts], [len(part[1]) for part in parts.values()])
    lists = pa.array(list(z), pa.list_(pa.float32()))
    pq.write_table(pa.table({"embedding": lists, "label": y, "split": split}), folder / "table.parquet")
    wide = {f"f{i}": z[:, i] for i in range(8)}
    pq.write_table(pa.table({**wide, "label": y, "split": split}), folder / "wide.parquet")
    (folder / "vectors" / "ood").mkdir(parents=True)
    for key, (features, labels) in parts.items():
        path = folder / "vectors" / f"{key.replace('ood:', 'ood/')}.npy"
        np.save(path, features)
        np.save(path.with_suffix(".label.npy"), labels)
    arrays = {
        f"{key}_{what}": parts[key][i] for key in ("train", "test") for i, what in enumerate(("features", "labels"))
    }
    head = {"head_weight": np.eye(3, 8), "head_bias": np.zeros(3)}
    np.savez(folder / "features.npz", **arrays, near_between=parts["ood:between"][0], **head)


def make_texts(folder, datasets):
    """Texts of two topics, and OOD ones; as one file, as files of splits, and as a saved data set."""
    topics = {"money": "please pay bill number", "weather": "will it rain on day"}
    rows = [(f"{start} {i}", label, split) for label, start in topics.items()
            for split, count in (("train", 40), ("test", 12)) for i in range(count)]  # fmt: skip
    rows += [(f"sing song number {i}", "", "ood:songs") for i in range(12)]
    (folder / "texts.csv").write_text("text,label,split\n" + "".join(f"{','.join(row)}\n" for row in rows))
    (folder / "queries" / "ood").mkdir(parents=True)
    for split in ("train", "test", "ood:songs"):
        content = "text,label\n" + "".join(f"{text},{label}\n" for text, label, part in rows if part == split)
        (folder / "queries" / f"{split.replace('ood:', 'ood/')}.csv").write_text(content)
    names = {"train": "train", "test": "test", "ood:songs": "strange"}
    columns = {
        names[s]: {"text": [r[0] for r in rows if r[2] == s], "label": [r[1] for r in rows if r[2] == s]} for s in names
    }
    made = {name: datasets.Dataset.from_dict(column) for name, column in columns.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder / "saved"))


def make_saved_images(folder, datasets):
    files = sorted((folder / "photos" / "train").rglob("*.png"))
    images = [{"bytes": file.read_bytes(), "path": None} for file in files]
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    content = {"image": images, "label": [file.parent.name for file in files]}
    data = datasets.Dataset.from_dict(content, features=kinds)
    datasets.DatasetDict({"train": data}).save_to_disk(str(folder / "saved_images"))


@pytest.fixture(scope="module")
def own_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_data")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    make_photos(folder / "photos")
    make_vectors(folder)
    make_texts(folder, datasets)
    make_saved_images(folder, datasets)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("line", shell_lines(OWN_DATA))
def test_commands_on_own_data_run(line, own_data, tmp_path):
    for item in own_data.iterdir():
        (tmp_path / item.name).symlink_to(item)
    out = run(line, tmp_path)
    assert "RMD" in out
    assert "AUROC" in out
    assert "Failed" not in out


@QUIET
def test_the_python_block_of_the_page_on_own_data_runs(names, tmp_path):
    make_vectors(tmp_path)
    run_blocks("docs/own_data.md", names)
    assert {row["ood"] for row in names["monitor"].history} >= {"between"}


def test_the_page_on_own_data_names_every_benchmark_of_its_kind():
    own = {
        name
        for name in ("features", "embeddings", "hf_dataset", "image_folder", "text_file")
        if f"`{name}`" in OWN_DATA
    }
    assert own == {re.search(r"benchmark=(\w+)", line)[1] for line in shell_lines(OWN_DATA)}
    assert len(own) == 5
