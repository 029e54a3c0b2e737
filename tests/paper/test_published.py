"""The paper's numbers in our data are those of the source document."""

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
    for (benchmark, heading, numbers), (line, values) in zip(published, paper.TABLES[table].items(), strict=True):
        assert line.startswith(f"{benchmark}, ")
        assert list(values.values()) == numbers
        if heading is not None:
            assert line.endswith(f", {_BACKBONES[re.match(r'[A-Za-z]+', heading).group()]}")


@pytest.mark.data
def test_every_number_of_the_text_stands_in_the_source(document):
    said = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", document)}
    assert {value for study in paper.TEXT.values() for numbers in study.values() for value in numbers.values()} <= said
    assert set(paper.SIMULATION_SIZES.values()) <= said
