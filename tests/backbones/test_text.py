"""Text encoders through transformers, on a BERT of two layers made here."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rmd_plugin.backbones.fetch import WeightsNotFoundError, package_folder
from rmd_plugin.backbones.text import BERT

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "what", "is", "the", "weather", "in", "paris", "book", "a", "flight", "to"]
TEXTS = ["what is the weather in paris", "book a flight", "is", "a flight to the paris weather is what"]


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT of two layers with its tokenizer, as transformers saves them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra text)")
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return str(folder)


def own_ids(text: str) -> list[int]:
    return [2, *(WORDS.index(word) for word in text.split()), 3]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_text_features_are_those_of_each_text_alone(bert_folder: str, pooling: str) -> None:
    import transformers

    backbone = BERT(bert_folder, pooling=pooling, max_length=20, num_classes=3).eval()
    assert backbone.feature_dim == 16
    assert backbone.test_transform is not None
    items = [backbone.test_transform(text) for text in TEXTS]
    assert {tuple(item.shape) for item in items} == {(20,)}
    assert items[1].tolist() == own_ids(TEXTS[1]) + [0] * 15
    batch = next(iter(DataLoader(items, batch_size=4)))
    features = backbone.encoder(batch)

    reference = transformers.BertModel.from_pretrained(bert_folder).eval()
    for text, feature in zip(TEXTS, features, strict=True):
        alone = reference(torch.tensor([own_ids(text)])).last_hidden_state[0]
        expected = alone.mean(dim=0) if pooling == "mean" else alone[0]
        torch.testing.assert_close(feature, expected, rtol=1e-4, atol=1e-5)
    # padding further changes nothing
    longer = torch.nn.functional.pad(batch, (0, 5))
    torch.testing.assert_close(backbone.encoder(longer), features)


def test_the_tokenising_transform_pickles_for_loader_workers(bert_folder: str) -> None:
    transform: Any = BERT(bert_folder, max_length=20).test_transform
    again = pickle.loads(pickle.dumps(transform))
    assert torch.equal(again(TEXTS[0]), transform(TEXTS[0]))
    assert repr(again) == repr(transform)
    assert " at 0x" not in repr(transform)


def test_every_weight_of_a_text_backbone_learns(bert_folder: str) -> None:
    # one that never gets a gradient, such as BERT's own pooler, would stop DDP
    backbone = BERT(bert_folder, max_length=20, num_classes=3)
    assert all(module.training for module in backbone.modules())  # transformers hands it over in evaluation mode
    assert backbone.train_transform is not None
    backbone(torch.stack([backbone.train_transform(text) for text in TEXTS])).sum().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []


def test_a_text_checkpoint_comes_back_and_needs_no_pretrained_weights(
    bert_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    source = BERT(bert_folder, max_length=20, num_classes=3)
    torch.save({"state_dict": {f"model.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "text.ckpt")
    assert BERT(bert_folder, max_length=20, pretrained=False).fingerprint() != source.fingerprint()
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded in vain"))
    loaded = BERT(bert_folder, max_length=20, checkpoint=tmp_path / "text.ckpt")
    assert loaded.fingerprint() == source.fingerprint()


def test_a_frozen_text_encoder_stays_at_rest(bert_folder: str) -> None:
    backbone = BERT(bert_folder, max_length=20, frozen=True, num_classes=3).train()
    assert backbone.test_transform is not None
    batch = torch.stack([backbone.test_transform(text) for text in TEXTS])
    assert torch.equal(backbone.encoder(batch), backbone.encoder(batch))
    assert not backbone.encoder(batch).requires_grad
    assert backbone(batch).requires_grad


def test_text_options_are_checked(bert_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mean' or 'cls'"):
        BERT(bert_folder, pooling="max")
    with pytest.raises(ValueError, match=r"max_length must lie in 2\.\.32"):
        BERT(bert_folder, max_length=64)
    backbone = BERT(bert_folder, max_length=20)
    assert backbone.test_transform is not None
    with pytest.raises(TypeError, match=r"expected a text, got Tensor\. Does this backbone fit"):
        backbone.test_transform(torch.zeros(3))
    assert len(backbone.test_transform("what " * 50)) == 20
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsNotFoundError, match=r"folder .*empty") as caught:
        BERT(str(tmp_path / "empty"))
    assert "\n" not in str(caught.value)


def test_an_installed_package_that_carries_a_model_is_found(
    bert_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_text_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('finding the folder must not import the package')")
    (package / "model").symlink_to(bert_folder)
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("my-text-model") == package
    assert BERT("my-text-model", max_length=20).feature_dim == 16
    assert package_folder("owner/name") is None
    assert package_folder("not-installed-at-all") is None


def test_the_frameworks_detectors_run_on_a_text_backbone(bert_folder: str) -> None:
    from pytorch_ood.detector import Mahalanobis, MaxSoftmax

    backbone = BERT(bert_folder, max_length=20, frozen=True, num_classes=2)
    transform: Any = backbone.test_transform
    pairs = [(transform(text), index % 2) for index, text in enumerate(TEXTS * 6)]
    loader = DataLoader(pairs, batch_size=5)
    batch = torch.stack([x for x, _ in pairs[:4]])
    assert MaxSoftmax(backbone)(batch).shape == (4,)
    assert Mahalanobis(backbone.encoder).fit(loader)(batch).shape == (4,)
