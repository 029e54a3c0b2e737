"""The recipes of CONTRIBUTING.md, followed: its benchmark, backbone and callback run together."""

import re
from pathlib import Path

import pandas
import pytest
from test_readme import blocks, run

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("part", ["detector", "benchmark", "backbone", "callback"])
def test_a_recipe_has_at_most_twenty_lines_of_code(part):
    recipe = PAGE.partition(f"## Add a {part}\n")[2].partition("\n## ")[0]
    lines = [line for line in "".join(blocks("python", page=recipe)).splitlines() if line.strip()]
    assert 0 < len([line for line in lines if not line.startswith(("import", "from"))]) <= 20


@pytest.mark.slow
def test_the_parts_of_the_recipes_run_together(tmp_path):
    recipes = PAGE[PAGE.index("## Add a benchmark") :]
    (tmp_path / "recipes.py").write_text("\n".join(blocks("python", page=recipes)))
    for block in blocks("yaml", page=recipes):
        path = tmp_path / re.match(r"# (conf/\S+)", block)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r"rmd_plugin\.\w+\.(\w+)", r"recipes.\1", block))
    parts = (
        'benchmark=rings backbone=wide "callbacks=[default,head_norm]" "detector=[rmd,msp]" logger=csv figures=false'
    )
    run(f"rmd-train --config-dir conf {parts} trainer.max_epochs=3 hydra.run.dir=run", tmp_path)
    rows = pandas.read_csv(tmp_path / "run/rows.csv")
    assert {("rmd", "between"), ("msp", "between")} <= set(zip(rows["detector"], rows["ood"], strict=True))
    assert pandas.read_csv(next((tmp_path / "run").rglob("metrics.csv")))["head_norm"].notna().any()
