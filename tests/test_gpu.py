"""What can go wrong on a GPU only: devices of tensors, half precision, collectives of NCCL. Not run without CUDA."""

import pytest
import pytorch_lightning as pl
import torch
from callback_kit import QUIET, Classifier
from guard_kit import as_images, picture_guard, pictures
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, Calibrated, ClassMoments, FusedRMD, Guard, Mahalanobis, OODMonitor, RelativeFlow

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(pytest.mark.filterwarnings(pattern) for pattern in QUIET),
]


@pytest.fixture(autouse=True)
def no_process_group():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def samples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 4
    return torch.randn(count, 8, generator=generator) + 3 * torch.nn.functional.one_hot(y, 8), y


def close(ours, reference, tolerance):
    return (ours.cpu().float() - reference).abs().max() < tolerance * reference.std()


@pytest.mark.parametrize("detector", [RMD, FusedRMD, Mahalanobis, lambda: RelativeFlow(max_epochs=2)])
def test_a_detector_gives_the_scores_of_the_cpu_wherever_it_was_fitted(detector):
    z, y = samples(400)
    expected = detector().fit_features(z, y).predict_features(z)
    on_gpu = detector().fit_features(z.to(DEVICE), y.to(DEVICE))
    assert on_gpu.predict_features(z.to(DEVICE)).device.type == DEVICE
    assert close(on_gpu.predict_features(z.to(DEVICE)), expected, 1e-3)
    assert close(detector().fit_features(z, y).to_module().to(DEVICE)(z.to(DEVICE)), expected, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_in_half_precision_are_scored_as_the_same_numbers_in_single_precision(dtype):
    z, y = samples(400)
    half = z.to(DEVICE, dtype)
    expected = RMD().fit_features(half.float().cpu(), y).predict_features(half.float().cpu())
    assert close(RMD().fit_features(half, y.to(DEVICE)).predict_features(half), expected, 1e-3)


def test_a_calibrated_detector_moves_between_devices(tmp_path):
    (z, y), (held_out, _) = samples(400), samples(200, seed=1)
    detector = Calibrated(RMD()).fit_features(z, y).calibrate_features(held_out)
    expected = detector.p_value_features(z)
    detector.save(tmp_path / "rmd.safetensors")
    moved = Calibrated.load(tmp_path / "rmd.safetensors").to(DEVICE)
    torch.testing.assert_close(moved.p_value_features(z.to(DEVICE)).cpu(), expected, atol=0.01, rtol=0)


def test_a_guard_decides_on_the_gpu_as_on_the_cpu(tmp_path):
    guard = picture_guard()
    guard.save(tmp_path / "guard", onnx=False)
    images = as_images(pictures(12, seed=3)) + as_images(pictures(12, seed=4, ood=True))
    expected = guard(images)
    moved = Guard.load(tmp_path / "guard", device=DEVICE)(images)
    assert close(torch.as_tensor(moved.score), torch.as_tensor(expected.score), 0.01)
    assert list(moved.class_name) == list(expected.class_name)


@pytest.mark.parametrize("options", [{}, {"precision": "16-mixed"}, {"precision": "bf16-mixed"}, {"strategy": "ddp"}])
@pytest.mark.parametrize("refit", ["pass", "stream"])
def test_the_monitor_measures_on_the_gpu_without_changing_the_weights(options, refit, tmp_path):
    loaders = [DataLoader(TensorDataset(*samples(120, seed)), batch_size=30) for seed in (0, 1)]
    far = DataLoader(TensorDataset(20 + samples(60, 2)[0], torch.full((60,), -1)), batch_size=30)

    def train(*callbacks):
        module = Classifier()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            max_epochs=2, accelerator=torch.device(DEVICE).type, devices=1, callbacks=list(callbacks),
            enable_checkpointing=False, default_root_dir=tmp_path, **quiet, **options,
        )  # fmt: skip
        pl.seed_everything(0, verbose=False)
        trainer.fit(module, *loaders)
        return module.state_dict(), trainer.callback_metrics

    monitor = OODMonitor({"rmd": RMD(shrinkage="oas")}, head="model.fc", ood={"far": far}, refit=refit)
    (plain, _), (watched, metrics) = train(), train(monitor)
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert metrics["ood/rmd/far/AUROC"] > 0.9


def test_moments_of_tensors_on_the_gpu_are_summed_over_processes_by_nccl(tmp_path):
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    z, y = samples(400)
    moments = ClassMoments().to(DEVICE)
    moments.update(z.to(DEVICE), y.to(DEVICE))
    detector = RMD().fit_moments(moments.compute())
    assert close(detector.predict_features(z), RMD().fit_features(z, y).predict_features(z), 1e-5)
