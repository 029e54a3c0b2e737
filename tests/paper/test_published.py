"""The paper's numbers in our data are those of the source document."""

import math
import re

import pytest

from rmd_plugin.paper import published as paper

_BACKBONES = {"ViT": "ViT-B/16", "BiT": "BiT R50x1", "CLIP": "CLIP", "BERT": "BERT"}


@pytest.fixture(scope="module")
def document(data_dir) -> str:
    files = sorted((data_dir.parent / "paper").glob("*.txt"))
    if not files:
        pytest.skip("the source document is not beside the data: expected RMD_DATA_DIR/../paper/*.txt")
    # comments are not text, an escaped percent sign is
    return re.sub(r"(?<!\\)%.*", "", files[0].read_text(encoding="utf-8"))


def read_table(document: str, label: str) -> list[tuple[str, str | None, list[float]]]:
    """Lines of a LaTeX table as (benchmark, heading above it, numbers)."""
    (body,) = [
        part
        for part in re.findall(r"\\begin\{table\}(.*?)\\end\{table\}", document, re.S)
        if f"\\label{{{label}}}" in part
    ]
    heading, lines = None, []
    for line in re.split(r"\\\\", body.replace("\n", " ")):
        head = re.search(r"\\multicolumn\{\d\}\{c\}\{(.*?)\}", line)
        if head:
            heading = head.group(1)
        cells = [re.sub(r"\\hline|\\footnotemark", "", cell).strip() for cell in line.split("&")]
        numbers = [re.search(r"\d+\.\d+", cell) for cell in cells[1:]]
        if len(cells) > 1 and all(numbers):
            lines.append((cells[0], heading, [float(number.group()) for number in numbers]))
    return lines


@pytest.mark.data
@pytest.mark.parametrize(("table", "label"), [("table1", "base_model"), ("table2", "pretrain"), ("table3", "finetune")])
def test_every_cell_of_the_tables_is_the_published_one(document, table, label):
    published = read_table(document, f"tab:{label}")
    assert len(published) == len(paper.TABLES[table])
    for (benchmark, heading, numbers), row in zip(published, paper.TABLES[table], strict=True):
        assert row.benchmark == benchmark
        assert list(row.auroc.values()) == numbers
        if heading is not None:
            assert row.backbone == _BACKBONES[re.match(r"[A-Za-z]+", heading).group()]


# how the source says each number: the number is the group
_SAID = {
    "spectrum/mahalanobis": r"distinguish OOD from IND \(AUROC=([\d.]+)\\%\)",
    "spectrum/rmd": r"AUROC using RMD is improved to ([\d.]+)\\%",
    "spectrum/threshold": r"in the top (\d+) dimensions",
    "simulation/mahalanobis": r"the AUROC is only ([\d.]+)\\%",
    "simulation/rmd": r"detecting OOD perfectly with ([\d.]+)\\% AUROC",
    "simulation/dim": r"number of dimensions \$D=(\d+)\$",
    "simulation/sigma": r"for the second class, and \$\\sigma=([\d.]+)\$",
    "simulation/n_train": r"randomly sample \$n=([\d,]+)\$",
    "simulation/n_test": r"we sample \$(\d+)\$ data points from each class as the test IND",
    "flows/flow_likelihood": r"are ([\d.]+)\\%, and [\d.]+\\% respectively",
    "flows/relative_flow": r"are [\d.]+\\%, and ([\d.]+)\\% respectively",
    "partial/peak": r"reaches to the peak of ([\d.]+)\\%",
    "partial/peak_components": r"at \$d=(\d+)\$, and then decreases",
    "partial/marginal": r"AUROC being only ([\d.]+)\\% for CIFAR-100 vs CIFAR-10",
    "partial/marginal_cifar10": r"and ([\d.]+)\\% for CIFAR-10 vs CIFAR-100",
    "robustness/md_early": r"quickly increases to ([\d.]+)\\% at step 50k",
    "robustness/md_end": r"drops to ([\d.]+)\\%",
    "robustness/train_accuracy_early": r"test accuracies being ([\d.]+)\\% and 82",
    "robustness/test_accuracy_early": r"being 88.59\\% and ([\d.]+)\\%",
    "robustness/train_accuracy_end": r"higher training accuracy of ([\d.]+)\\%",
    "robustness/test_accuracy_end": r"higher test accuracy of ([\d.]+)\\%",
    "robustness/bert_md_peak": r"achieves the peak of ([\d.]+)\\%",
    "robustness/bert_train_accuracy_peak": r"being only ([\d.]+)\\% and",
    "robustness/bert_test_accuracy_peak": r"being only [\d.]+\\% and ([\d.]+)\\%",
    "accuracy/vit_cifar100": r"ViT model has in-distribution test accuracy of ([\d.]+)\\% for CIFAR-100",
    "accuracy/vit_cifar10": r"ViT model has [^.]*\.\d+\\% for CIFAR-100, and ([\d.]+)\\%",
    "accuracy/bit_cifar100": r"BiT model has in-distribution test accuracy of ([\d.]+)\\% for CIFAR-100",
    "accuracy/bit_cifar10": r"BiT model has [^.]*\.\d+\\% for CIFAR-100, and ([\d.]+)\\%",
    "accuracy/genomics_masked_token": r"masked token is ([\d.]+)\\%",
    "accuracy/genomics_bert": r"100,000 steps [^.]*and the classification accuracy is ([\d.]+)\\%",
    "accuracy/clinc_bert": r"3 epochs [^.]*\. The classification accuracy is ([\d.]+)\\%",
}


def test_every_number_of_the_text_has_a_place_in_the_source():
    assert set(_SAID) == set(paper.TEXT)


@pytest.mark.data
@pytest.mark.parametrize("name", sorted(_SAID))
def test_every_number_of_the_text_is_the_published_one(document, name):
    found = re.findall(_SAID[name], " ".join(document.split()))
    assert len(set(found)) == 1, f"expected one place, found {found}"
    assert paper.TEXT[name] == float(found[0].replace(",", ""))


def test_all_numbers_are_percentages_or_positive_sizes():
    for rows in paper.TABLES.values():
        assert all(40 < value < 100 for row in rows for value in row.auroc.values())
    assert all(value > 0 and math.isfinite(value) for value in paper.TEXT.values())
