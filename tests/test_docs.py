"""What the site promises beyond its build: examples everywhere, a gallery that says its limits, no lost page."""

import functools
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from guard_kit import picture_guard
from test_readme import README, blocks, run, shell_lines
from torch.utils.data import DataLoader

import rmd_plugin
import rmd_plugin.backbones
import rmd_plugin.benchmarks

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SCRIPTS = sorted((DOCS / "gallery").glob("*.py"))
PAGES = [DOCS / f"{name}.md" for name in ("index", "lightning", "compare", "sweep", "deploy", "choose", "huggingface")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_gallery_script_has_a_title_a_limit_and_words_for_every_picture(script):
    text = script.read_text()
    assert re.match(r"# %% \[markdown\]\n# # \S", text)
    last = text.rsplit("# %% [markdown]", 1)[1]
    assert last.startswith("\n# ## What this does not show\n#\n# ")
    shown = re.findall(r'^# alt: .{30,}\nfigure\.savefig\("\w+\.png"', text, re.MULTILINE)
    assert len(shown) == text.count("savefig")
    assert shown or "print(" in text


def test_the_notebooks_are_those_of_the_gallery():
    spec = importlib.util.spec_from_file_location("site_builder", ROOT / ".ci/site.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    for name in builder.NOTEBOOKS:
        committed = (DOCS / f"gallery/{name}.ipynb").read_text()
        assert committed == builder.notebook(name), "python .ci/site.py writes them anew"


def test_the_site_and_the_list_for_language_models_have_every_page():
    navigation = (ROOT / ".ci/mkdocs.yml").read_text()
    assert [path.name for path in DOCS.glob("*.md") if f": {path.name}\n" not in navigation] == []
    listed = re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text())
    assert [link for link in listed if not (DOCS / link).is_file()] == []
    assert {path.name for path in DOCS.glob("*.md")} <= set(listed)
    assert {f"gallery/{script.name}" for script in SCRIPTS} <= set(listed)
    for script in SCRIPTS:
        assert f"gallery/{script.stem}.md" in navigation


@pytest.mark.parametrize(
    ("package", "name"),
    [
        (package, name)
        for package in (rmd_plugin, rmd_plugin.benchmarks, rmd_plugin.backbones)
        for name in package.__all__
        if name != "__version__"
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_public_name_has_a_docstring_with_an_example(package, name):
    item = getattr(package, name)
    text = inspect.getdoc(item) or ""
    if inspect.isclass(item) and issubclass(item, Exception):  # warnings are exceptions too
        assert text
    else:
        assert re.search(r"^Example:\n(?:.*\n)*?\s+>>> ", text, re.MULTILINE), name


def test_pages_repeat_the_blocks_of_the_readme_word_by_word():
    shown = blocks("python")
    for page in ("lightning.md", "deploy.md"):
        block = blocks("python", page=(DOCS / page).read_text())[0]
        assert block in shown


def test_the_options_of_the_monitor_on_its_page_are_its_own():
    text = (DOCS / "lightning.md").read_text()
    table = text[text.index("| option |") :].split("\n\n")[0]
    parameters = inspect.signature(rmd_plugin.OODMonitor).parameters
    first_cells = " ".join(row.split("|")[1] for row in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", first_cells)) <= set(parameters)
    refit = next(row for row in table.splitlines() if row.startswith("| `refit`"))
    for value in re.findall(r'`"(\w+)"`', refit):
        rmd_plugin.OODMonitor(["rmd"], refit=value)  # refuses another word


def test_the_page_on_guards_names_the_files_that_there_are(tmp_path):
    picture_guard().save(tmp_path / "guard", onnx=False)
    table = (DOCS / "deploy.md").read_text().split("| in the folder |")[1].split("\n\n")[0]
    named = set(re.findall(r"`([\w.]+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])))
    assert {path.name for path in (tmp_path / "guard").iterdir()} == named - {"model.onnx"}


def test_the_block_of_the_first_page_runs():
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(300, 5, generator=generator), torch.arange(300) % 3
    z[:, 0] += 9.0 * y
    names = {"z_train": z[:200], "y_train": y[:200], "z_held_out": z[200:], "z_new": z[:4] + 40}
    (block,) = blocks("python", page=(DOCS / "index.md").read_text())
    exec(compile(block, "docs/index.md", "exec"), names)
    assert names["detector"].is_ood_features(names["z_new"]).all()


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*logging interval", "ignore::FutureWarning")
def test_the_block_of_the_page_on_hugging_face_runs(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    transformers.utils.logging.disable_progress_bar()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=60, num_labels=3, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained("tiny")
    generator = torch.Generator().manual_seed(0)

    def loader(count, label=None):
        classes = torch.arange(count) % 3
        tokens = 20 * classes[:, None] + torch.randint(0, 20, (count, 8), generator=generator)
        labels = classes if label is None else torch.full_like(classes, label)
        return DataLoader([{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)], batch_size=30)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    monkeypatch.setattr(pl, "Trainer", functools.partial(pl.Trainer, **quiet, enable_model_summary=False))
    names = {"name": "tiny", "train_loader": loader(90), "val_loader": loader(60), "other_loader": loader(60, -1)}
    (block,) = blocks("python", page=(DOCS / "huggingface.md").read_text())
    exec(compile(block, "docs/huggingface.md", "exec"), names)
    assert {row["ood"] for row in names["monitor"].history} >= {"other"}


def commands():
    lines = [line for page in PAGES for line in shell_lines(page.read_text())]
    return [line for line in dict.fromkeys(lines) if line not in shell_lines(README)]


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in commands() if not re.match("rmd-(score|report)|.*optuna", line)])
def test_commands_of_the_pages_compose(command, tmp_path):
    assert shlex.split(command)[0].startswith("rmd-")
    assert run(f"{command} --cfg job", tmp_path)
