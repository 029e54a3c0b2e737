"""A config that comes from a run folder makes classes of known packages only, unless the user trusts it."""

import logging
import pickle

import config_kit
import pytest
import yaml
from omegaconf import OmegaConf

from rmd_plugin.app import commands, trust
from rmd_plugin.app.configs import repeatable
from rmd_plugin.app.train import load_run
from rmd_plugin.app.trust import UntrustedConfigError, check_config

TARGETS = [
    "os.system", "subprocess.Popen", "builtins.eval", "numpy.load", "torch.load", "torch.hub.load", "pickle.loads",
    "torch.utils.cpp_extension.load_inline", "hydra.utils.get_method", "hydra.utils.get_object", "mine.Squares",
    "torch.optim.optimizer.torch.load", "torch.nn.modules.module.torch.load", "torch.optim.optimizer.functools.partial",
    "rmd_plugin.report.provenance.subprocess.Popen", "rmd_plugin.app.commands.os.system", "rmd_plugin.RMD.load",
    "rmd_plugin.report.run_folder.RunFolder", "pytorch_ood.benchmark.Benchmark", "pytorch_lightning.Nothing",
    "torchvision.models._api.load_state_dict_from_url", "torchvision.datasets.CIFAR10", "rmd_plugin", "torch", "",
    "rmd_plugin_evil.Class", "${seed}", None, 3, ["os.system"], {"a": "os.system"},
]  # fmt: skip
WANTED = [
    "rmd_plugin.RMD", "rmd_plugin.benchmarks.Digits", "rmd_plugin.OODMonitor", "pytorch_ood.detector.KNN",
    "torch.optim.AdamW", "torch.optim.lr_scheduler.CosineAnnealingLR", "torch.nn.Linear", "pytorch_lightning.Trainer",
    "torchvision.models.resnet18", "torchvision.transforms.Resize", "pytorch_lightning.callbacks.EarlyStopping",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_target_of_elsewhere_is_refused_wherever_it_stands(target):
    node = {"_target_": target, "_partial_": True, "_args_": ["touch x"]}
    for config in ({"benchmark": node}, {"callbacks": [{"a": {"_target_": "rmd_plugin.RMD", "encoder": node}}]}):
        with pytest.raises(UntrustedConfigError, match=r"_target_=.*trust_config=true\.$"):
            check_config(config, "config.yaml")


@pytest.mark.parametrize("target", WANTED)
def test_a_part_of_a_known_package_is_made(target):
    check_config({"a": [{"_target_": target}]}, "config.yaml")


@pytest.mark.parametrize("text", [
    "${oc.env:HOME}", "${oc.env:AWS_KEY,null}", "${oc.create:{_target_: os.system}}", "${oc.decode:'x'}", "${${x}:y}",
    "a ${now:%Y} ${oc.env:HOME}", "${now:${oc.env:HOME}}", "${ oc.env:HOME}", "${oc.env:RMD_DATA_DIRS}", "${oc.${x}:y}",
    "${oc.select:x,{_target_: os.system}}", "${rmd_monitored:{a: {_target_: os.system}},[a]}", "${rmd_x:${y},{a: b}}",
])  # fmt: skip
def test_the_environment_is_not_read(text):
    with pytest.raises(UntrustedConfigError, match="asks for more"):
        check_config({"logger": {"uri": [text]}}, "config.yaml")


@pytest.mark.slow
def test_every_shipped_experiment_and_choice_passes_as_it_is_kept():
    words = [[f"experiment={path.relative_to(config_kit.CONF / 'experiment').with_suffix('')}"]
             for path in (config_kit.CONF / "experiment").rglob("*.yaml") if not path.name.startswith("_")]  # fmt: skip
    words += [[f"logger={name}"] for name in config_kit.choices("logger")]
    words += [[f"callbacks=[default,{name}]"] for name in config_kit.choices("callbacks") if name != "default"]
    words += [[f"backbone={name}"] for name in config_kit.choices("backbone")]
    words += [["detector=all"], ["pretrain=masked_tokens"], ["optimizer=sgd"]]
    assert len(words) > 30
    with config_kit.hydra_initialised():
        from rmd_plugin.app.configs import compose_train

        for overrides in words:
            kept = yaml.safe_load(repeatable(compose_train(overrides), "train"))
            assert kept.pop("defaults") in trust._DEFAULTS
            assert "trust_config" not in kept
            check_config(kept, " ".join(overrides))


def test_load_run_makes_nothing_that_is_not_allowed(tmp_path):
    touched = tmp_path / "touched"
    cfg = OmegaConf.create({"benchmark": {"_target_": "pathlib.Path.touch", "_args_": [str(touched)]}})
    with pytest.raises(UntrustedConfigError, match=r"pathlib\.Path\.touch.*load_run\(cfg, trust_config=True\)"):
        load_run(cfg)
    assert not touched.exists()


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def kept_config(touched):
    """What the kept config of a run looks like if somebody changed it, in every place where something can be run."""
    touch = {"_target_": "pathlib.Path.touch", "_args_": [{"_target_": "pathlib.Path", "_args_": [str(touched)]}]}
    good = {"defaults": [{"command@hydra": "compare"}, "_self_"], "seed": 0}
    yield "_target_=pathlib.Path", {**good, "benchmark": touch}
    yield "settings of Hydra", {**good, "hydra": {"callbacks": {"x": touch}}}
    yield "settings of Hydra", {**good, "defaults": [*good["defaults"], {"override hydra/launcher": "evil"}]}
    yield "settings of Hydra", {"seed": 0}


def test_the_command_runs_nothing_of_a_kept_config_that_was_changed(tmp_path, monkeypatch, capsys):
    touched = tmp_path / "touched"
    monkeypatch.chdir(tmp_path)
    for number, (reason, config) in enumerate(kept_config(touched)):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "config.yaml").write_text(yaml.safe_dump({**config, "trust_config": True}))
        for flags in (
            ["--config-dir", f"run{number}", "--config-name", "config"],
            [f"-cd=run{number}", "-cn=config.yaml"],
        ):
            assert config_kit.call(commands.compare, monkeypatch, "rmd-compare", *flags, "hydra.run.dir=out") == 1
            error = capsys.readouterr().err
            assert reason in error
            assert error.count("\n") == 1
            assert error.endswith("If you trust it, or wrote it: trust_config=true.\n")
    (tmp_path / "job.pickle").write_bytes(pickle.dumps(Touch(str(touched))))
    for flags in (["--config-path", str(tmp_path / "run0")], ["--experimental-rerun", "job.pickle"]):
        assert config_kit.call(commands.compare, monkeypatch, "rmd-compare", *flags) == 1
        assert "can run any program" in capsys.readouterr().err
    assert not touched.exists()
    assert not (tmp_path / "out").exists()


def test_a_header_of_hydra_in_a_kept_config_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(
        "\n # @package hydra.callbacks\ndefaults:\n- command@hydra: train\n- _self_\n"
    )
    monkeypatch.setattr("sys.argv", ["rmd-train", "--config-dir", str(tmp_path), "--config-name", "config"])
    with pytest.raises(UntrustedConfigError, match="settings of Hydra"):
        trust.check_command_line()
    monkeypatch.setattr("sys.argv", [*trust.sys.argv, "trust_config=true"])
    trust.check_command_line()
    # forced, because the kept config does not hold it
    assert trust.sys.argv[-1] == "++trust_config=true"


def test_what_we_log_is_one_plain_line(caplog, monkeypatch):
    monkeypatch.setattr(logging, "_logRecordFactory", commands._plain_record)
    logging.getLogger("rmd_plugin.x").warning("%s", "a\n\x1b[2Jb")
    logging.getLogger("other").warning("a\nb")
    assert caplog.messages == ["a \\x1b[2Jb", "a\nb"]
