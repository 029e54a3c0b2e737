"""Every file of conf/benchmark: its command, the class's own defaults, and a benchmark when it is composed."""

import importlib.util
import inspect
import re
import shlex

import config_kit
import pytest
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from rmd_plugin.benchmarks import DataNotFoundError, Framework, OODBenchmark

OWN = ("features", "embeddings", "hf_dataset", "image_folder", "text_file")
NAMES = config_kit.choices("benchmark")
#: our name -> class of pytorch_ood.benchmark
FRAMEWORK = {
    "openood_cifar10": "CIFAR10_OpenOOD",
    "openood_cifar100": "CIFAR100_OpenOOD",
    "openood_imagenet200": "ImageNet200_OpenOOD",
    "openood_imagenet1k": "ImageNet1K_OpenOOD",
    "odin_cifar10": "CIFAR10_ODIN",
    "odin_cifar100": "CIFAR100_ODIN",
    "ssb_cub": "CUB_SSB",
    "ssb_aircraft": "Aircraft_SSB",
    "ssb_cars": "StanfordCars_SSB",
    "mibood_midog": "MIDOG_OpenMIBOOD",
    "mibood_phakir": "PhaKIR_OpenMIBOOD",
    "mibood_oasis3": "OASIS3_OpenMIBOOD",
}


def composed(name, *overrides):
    return config_kit.composed("compare", f"benchmark={name}", *overrides).benchmark


#: data that comes with us, with scikit-learn, or is made
PACKAGED = ("digits", "intents", "simulation")


def test_there_is_a_config_for_every_benchmark_of_the_plan():
    expected = "cifar100_vs_cifar10 cifar10_vs_cifar100 clinc150 digits features genomics intents simulation framework"
    assert sorted([*expected.split(), *OWN[1:], *FRAMEWORK]) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_config_names_its_command_its_class_and_the_class_s_own_defaults(name, monkeypatch):
    monkeypatch.delenv("RMD_DATA_DIR", raising=False)
    first = (config_kit.CONF / "benchmark" / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# rmd-compare ")
    assert f"benchmark={name}" in first
    config = composed(name)
    target = get_class(config._target_)
    assert issubclass(target, OODBenchmark)
    assert name == "framework" or name in FRAMEWORK or target.name == name
    parameters = inspect.signature(target).parameters
    for key in config:
        if key in ("_target_", "path") or (key == "name" and target is Framework):
            continue
        value = config[key]
        value = tuple(value) if OmegaConf.is_list(value) else value
        assert parameters[key].default == value, key
    # everything that can be set on the command line is there to be set; transforms come from the backbone, moments from
    # tables that were read before
    left_out = set(parameters) - set(config) - {"train_transform", "test_transform", "moments"}
    assert left_out <= {"data_dir"}
    assert {"limit_train", "limit_test", "seed"} <= set(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*PACKAGED, "framework", *OWN)])
def test_absent_data_is_one_error_that_names_the_remedy(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    with pytest.raises(InstantiationException) as caught:
        instantiate(composed(name, f"benchmark.data_dir={tmp_path}"))
    cause = caught.value.__cause__
    assert isinstance(cause, DataNotFoundError)
    assert str(tmp_path) in str(cause)
    assert "download=True (benchmark.download=true on the command line)" in str(cause)


@pytest.mark.parametrize("name", OWN)
def test_own_data_that_are_not_there_are_one_error_with_the_places_looked_in(name, tmp_path, monkeypatch):
    if name == "hf_dataset":
        pytest.importorskip("datasets")
    if importlib.util.find_spec("datasets"):
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InstantiationException) as caught:
        instantiate(composed(name, "benchmark.path=nothing", f"paths.data_dir={tmp_path}"))
    assert isinstance(caught.value.__cause__, DataNotFoundError)
    assert str(tmp_path / "nothing") in str(caught.value.__cause__)
    assert "\n" not in str(caught.value.__cause__)


@pytest.mark.parametrize("name", OWN)
def test_every_option_of_own_data_is_explained_in_its_file(name):
    lines = (config_kit.CONF / "benchmark" / f"{name}.yaml").read_text().partition("_target_")[2].splitlines()[1:]
    plain = [line for line in lines if "#" not in line]
    assert [line.partition(":")[0] for line in plain] == ["limit_train", "limit_test", "seed"]


def test_every_option_that_a_message_names_can_be_composed():
    sources = (config_kit.ROOT / "rmd_plugin" / "benchmarks").glob("*.py")
    named = {option for source in sources for option in re.findall(r"\bbenchmark\.(\w+)=", source.read_text())}
    options = set().union(*(OmegaConf.load(config_kit.CONF / "benchmark" / f"{name}.yaml") for name in NAMES))
    assert {"on_bad", "features", "download", "input", "path"} <= named <= options


PAGE = (config_kit.ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", re.findall(r"^rmd-compare (.*)$", PAGE, flags=re.M))
def test_the_commands_of_the_page_on_benchmarks_compose_to_their_backbone(command):
    config = config_kit.composed("compare", *shlex.split(command))
    assert issubclass(get_class(config.benchmark._target_), OODBenchmark)
    accepted = set(config_kit.arguments(get_class(config.backbone._target_)))
    given = {str(key) for key in config.backbone if not str(key).startswith("_")}
    assert given - accepted <= {"num_classes", "checkpoint", "load_head", "frozen"}


def test_the_page_on_benchmarks_names_every_one_with_its_class():
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+_\w+)` \|", PAGE, flags=re.M))
    assert rows == FRAMEWORK
