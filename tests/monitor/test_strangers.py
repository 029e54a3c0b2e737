"""At home in everybody's training: the shapes of foreign modules, batches and loaders, in small."""

import callback_kit as kit
import pytest
import pytorch_lightning as pl
import torch
from callback_kit import OOD, TRAIN, VAL, Classifier, fit, loader, told, trainer, values
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_ood.detector import EnergyBased, MaxSoftmax, ViM
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from rmd_plugin import RMD, OODMonitor
from rmd_plugin.compare.adapters import EncodingError
from rmd_plugin.monitor.callback import OODMonitorWarning

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


def monitored(detectors=None, **options):
    return kit.monitored(detectors, **{"head": None, **options})


def dicts(data, x="image", y="label"):
    return DataLoader([{x: a, y: b, "path": "a.png"} for a, b in zip(*data, strict=True)], 16)


class Task(Classifier):
    """As torchgeo's tasks: batches are dicts, forward takes a tensor by any name, predict_step gives probabilities."""

    keys = ("image", "label")

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[self.keys[0]]), batch[self.keys[1]])

    def validation_step(self, batch, batch_idx):
        self(batch[self.keys[0]])

    def predict_step(self, batch, batch_idx):
        return self(batch[self.keys[0]]).softmax(1)


class Plain(Task):
    """The same without a predict_step of its own, and other names."""

    keys = ("img", "target")
    predict_step = pl.LightningModule.predict_step


@pytest.mark.parametrize("task", [Task, Plain])
def test_batches_that_are_dicts_need_no_setting(task):
    plain = monitored()
    fit(plain)
    watched = monitored(ood={"svhn": dicts(OOD, *task.keys)})
    fit(watched, module=task(), train=dicts(TRAIN, *task.keys), val=dicts(VAL, *task.keys), num_sanity_val_steps=2)
    assert values(watched) == pytest.approx(values(plain), abs=1e-6)


def test_a_batch_that_nobody_can_read_is_told_at_the_sanity_check():
    class Strange(Task):
        keys = ("strange", "kind")
        predict_step = pl.LightningModule.predict_step

        def training_step(self, batch, batch_idx):
            raise AssertionError("training has begun")

    with pytest.raises(EncodingError, match=r"forward=.*labels="):
        fit(monitored(), module=Strange(), val=dicts(VAL, "strange", "kind"), num_sanity_val_steps=1)


class MetaTensor(torch.Tensor):
    """As MONAI's: what is indexed by a mask no longer fits its metadata."""

    def __getitem__(self, index):
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
            raise ValueError("the metadata has another length")
        return super().__getitem__(index)


def test_tensors_with_metadata_are_taken_as_plain_ones():
    def collate(items):
        x, y = torch.utils.data.default_collate(items)
        return x.as_subclass(MetaTensor), y.as_subclass(MetaTensor)

    watched, plain = monitored(ood={"svhn": loader(OOD, collate_fn=collate)}), monitored()
    fit(watched, train=loader(TRAIN, collate_fn=collate), val=loader(VAL, collate_fn=collate))
    fit(plain)
    assert values(watched) == pytest.approx(values(plain))


def test_with_on_error_warn_an_error_of_the_monitors_own_does_not_end_the_training():
    class Late(Classifier):
        """Fails in the monitor's own passes, but not before the second epoch."""

        def forward(self, x):
            if not self.training and self.current_epoch > 0:
                raise ZeroDivisionError
            return super().forward(x)

        def validation_step(self, batch, batch_idx):
            pass

    watched = monitored({"rmd": RMD(), "msp": MaxSoftmax}, head=None)
    with pytest.warns(OODMonitorWarning):
        run, _ = fit(watched, module=Late(), max_epochs=2)
    assert run.current_epoch == 2
    assert all(value == value for value in values(watched, epoch=0).values())


def test_a_validation_set_of_foreign_labels_does_not_count_as_id_and_the_line_to_add_is_told():
    far = OOD[0], OOD[1] + 10
    right, wrong = monitored(ood_dataloaders={1: "far"}), monitored()
    fit(right, val=[loader(VAL), loader(far)])
    with pytest.warns(OODMonitorWarning, match=r'ood_dataloaders=\{1: "name"\}'):
        fit(wrong, val=[loader(VAL), loader(far)])
    assert values(wrong)["rmd", "svhn"] == values(right)["rmd", "svhn"]
    assert values(wrong, "threshold") == values(right, "threshold")
    with pytest.raises(RuntimeError, match="ood_dataloaders="):
        fit(monitored(on_error="raise"), val=[loader(VAL), loader(far)])


def test_detectors_are_not_loaded_with_other_weights(tmp_path):
    _, module = fit(monitored(), ModelCheckpoint(tmp_path, filename="best"))
    path = tmp_path / "best.ckpt"
    assert OODMonitor.load_detectors(path, module)["rmd"].is_ood(VAL[0]).shape == (len(VAL[0]),)
    with pytest.raises(ValueError, match="load_from_checkpoint"):
        OODMonitor.load_detectors(path, Classifier())


@pytest.mark.filterwarnings("ignore:.*samples are few")
def test_a_head_that_is_a_convolution_serves_detectors_on_logits_and_on_its_weights():
    class Conv(Classifier):
        def __init__(self):
            super().__init__()
            self.model.fc = nn.Sequential(nn.Unflatten(1, (16, 1, 1)), nn.Conv2d(16, kit.CLASSES, 1), nn.Flatten())

    for head in (None, "model.fc.1"):
        watched = monitored({"msp": "msp", "energy": EnergyBased, "vim": ViM, "rmd": RMD()}, head=head)
        fit(watched, module=Conv())
        assert watched.head == "model.fc.1"
        assert all(value == value for value in values(watched).values())


def test_ood_dataloaders_may_be_there_in_the_test_only():
    watched = OODMonitor({"rmd": RMD()}, ood_dataloaders={1: "far"})
    with pytest.warns(OODMonitorWarning, match="no OOD samples"):
        run, module = fit(watched, num_sanity_val_steps=1)
    run.test(module, [loader(VAL), loader(OOD)], verbose=False)
    assert values(watched, stage="test").keys() == {("rmd", "far"), ("rmd", "mean")}


def test_self_supervised_batches_ask_for_a_fit_loader():
    class Views(Classifier):
        """As BarlowTwins: two views and labels that are not used."""

        def training_step(self, batch, batch_idx):
            first, second, _ = batch
            return (self(first) - self(second)).square().mean()

    views = loader((TRAIN[0], TRAIN[0] + 0.1, TRAIN[1]))
    with pytest.raises(EncodingError, match="fit_loader="):
        fit(monitored(), module=Views(), train=views, num_sanity_val_steps=1)
    watched = monitored(fit_loader=loader(TRAIN))
    fit(watched, module=Views(), train=views)
    assert values(watched)["rmd", "svhn"] > 0.3


def test_one_sigmoid_output_gives_no_logits_to_score_and_that_is_told():
    class Binary(Classifier):
        def __init__(self):
            super().__init__()
            self.model.fc = nn.Linear(16, 1)

        def training_step(self, batch, batch_idx):
            return F.binary_cross_entropy_with_logits(self(batch[0])[:, 0], batch[1].float())

    def binary(data):
        return loader((data[0], data[1] % 2))

    watched = monitored({"rmd": RMD(), "msp": MaxSoftmax})
    with pytest.warns(OODMonitorWarning, match="'msp' failed to score: .*no logits") as caught:
        fit(watched, module=Binary(), train=binary(TRAIN), val=binary(VAL))
    assert len(told(caught)) == 1
    assert values(watched)["rmd", "svhn"] == values(watched)["rmd", "svhn"]


def text_module(transformers, name):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    if name == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{name}Config")(vocab_size=30, num_labels=kit.CLASSES, pad_token_id=0, **sizes)

    class Text(pl.LightningModule):
        """As the tutorials of Lightning and transformers write it."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = getattr(transformers, f"{name}ForSequenceClassification")(config)

        def forward(self, **inputs):
            return self.model(**inputs)

        def training_step(self, batch, batch_idx):
            return self(**batch).loss

        def validation_step(self, batch, batch_idx):
            self(**batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-3)

    return Text()


def texts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (count,), generator=generator)
    mask = (torch.arange(8) < lengths[:, None]).long()
    ids, y = torch.randint(3, 30, (count, 8), generator=generator) * mask, torch.arange(count) % kit.CLASSES
    ids[:, 0] = 3 + y
    rows = [{"input_ids": i, "attention_mask": m, "labels": label} for i, m, label in zip(ids, mask, y, strict=True)]
    return DataLoader(rows, 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "head"), [("Bert", "model.classifier"), ("GPT2", "model.score")])
def test_the_three_lines_of_the_readme_with_a_transformer(name, head, tmp_path):
    transformers = pytest.importorskip("transformers")
    monitor = OODMonitor({"rmd": RMD(shrinkage=0.1), "msp": MaxSoftmax}, head=head, ood={"other": texts(40, 3)})
    run = trainer(tmp_path, monitor, ModelCheckpoint(tmp_path, filename="best"), num_sanity_val_steps=2)
    module = text_module(transformers, name)
    run.fit(module, texts(96, 0), texts(48, 1))
    assert all(value == value for value in values(monitor).values())
    rmd = OODMonitor.load_detectors(tmp_path / "best.ckpt", module)["rmd"]
    batch = transformers.BatchEncoding(next(iter(texts(48, 1))))  # as tokenizers give it
    assert rmd.is_ood(batch).shape == rmd.is_ood(dict(batch)).shape == (16,)
