"""The recipes of CONTRIBUTING.md, followed: its benchmark, backbone and callback run together."""

import os
import re
import shutil
import subprocess
import sys
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
def test_a_detector_of_the_recipe_is_found_by_the_tests_that_all_detectors_share(tmp_path):
    root = Path(__file__).parents[1]
    for name in ("rmd_plugin", "conf", "tests/detectors", "tests/conftest.py", "tests/hub_cache.py", "CONTRIBUTING.md"):
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(root / name, tmp_path / name)
    shutil.copy(root / "pyproject.toml", tmp_path)
    recipe = PAGE.partition("## Add a detector\n")[2].partition("\n## ")[0]
    (tmp_path / "rmd_plugin/detectors/cosine.py").write_text("".join(blocks("python", page=recipe)))
    names = tmp_path / "rmd_plugin/__init__.py"
    names.write_text(
        names.read_text().replace("_MODULES = {\n", '_MODULES = {\n    "detectors.cosine": "Cosine",\n', 1)
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-n0", "-k", "Cosine", "tests/detectors/test_every_detector.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 15


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
