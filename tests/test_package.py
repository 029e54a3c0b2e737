import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rmd_plugin
from rmd_plugin.lazy import deprecated


def test_importing_the_package_does_not_import_torch():
    code = "import sys, rmd_plugin; dir(rmd_plugin); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", rmd_plugin.__all__)
def test_every_public_name_resolves(name):
    assert getattr(rmd_plugin, name) is not None
    assert name in dir(rmd_plugin)


def test_an_unknown_name_lists_the_public_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'RDM'\. Public names: .*RMD"):
        _ = rmd_plugin.RDM


def test_a_deprecated_function_works_and_names_its_replacement():
    @deprecated("0.3", use="new()")
    def old(value):
        return value + 1

    with pytest.warns(FutureWarning, match=r"old .* 0\.3.*new\(\)") as warned:
        assert old(1) == 2
    assert warned[0].filename == __file__


ROOT = Path(rmd_plugin.__file__).resolve().parents[1]
#: where the name of the import is not that of the distribution
DISTRIBUTIONS = {
    "PIL": "pillow",
    "google.protobuf": "protobuf",
    "google_crc32c": "google-crc32c",
    "hydra": "hydra-core",
    "lightning_fabric": "pytorch-lightning",  # has both
    "open_clip": "open-clip-torch",
    "sklearn": "scikit-learn",
}
#: not declared, and why
UNDECLARED = {
    "hydra_plugins": "Hydra's namespace of plugins",
    "joblib": "scikit-learn's documented way to run in parallel",
    "lightning_utilities": "apply_to_collection and rank_zero are part of Lightning's documented interface",
    "omegaconf": "Hydra's documented type of configs",
    "huggingface_hub": "comes with timm and transformers, whose extras the code asks for",
}


def imported(tree):
    """Top-level names that a module imports when it is loaded, and those that it imports later."""
    always, later = set(), set()

    def visit(node, inside):
        names = set()
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        for name in names:
            top = ".".join(name.split(".")[: 2 if name.startswith("google.") else 1])
            (later if inside else always).add(top)
        for child in ast.iter_child_nodes(node):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            visit(child, inside or function)

    visit(tree, False)
    return always, later


def test_every_imported_package_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-") for requirement in requirements}

    base = names(project["dependencies"])
    extra = base.union(*map(names, project["optional-dependencies"].values()))
    seen = set()
    for path in ROOT.glob("rmd_plugin/**/*.py"):
        always, later = imported(ast.parse(path.read_text()))
        for found, declared in ((always, base), (later, extra)):
            for name in found - set(sys.stdlib_module_names) - {"rmd_plugin", "__future__", *UNDECLARED}:
                distribution = DISTRIBUTIONS.get(name, name.lower().replace("_", "-"))
                seen.add(distribution)
                assert distribution in declared, f"{path.relative_to(ROOT)} imports {name}"
    assert base <= seen, "declared, but imported nowhere"


def test_the_version_of_the_code_is_the_one_that_is_released_and_cited():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?\w+)?", rmd_plugin.__version__)
    assert f"## [{rmd_plugin.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {rmd_plugin.__version__}\n" in (ROOT / "CITATION.cff").read_text()
