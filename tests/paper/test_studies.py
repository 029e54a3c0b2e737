"""The studies against the textbook, the detectors and closed forms; figures and tables that come of them."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from oracle import mahalanobis, rmd
from scipy.stats import ortho_group

from rmd_plugin import PartialMahalanobis
from rmd_plugin.compare.rows import make_row, make_rows
from rmd_plugin.paper import studies
from rmd_plugin.paper.figures import make_figures
from rmd_plugin.paper.published import TABLES, TEXT
from rmd_plugin.paper.simulation import limit_auroc, simulated_run, simulation_study
from rmd_plugin.report.figures import save_figure

TOY_SIMULATION = {
    "dim": 16, "sigma": 0.25, "n_train": 100, "n_test": 40, "seeds": 2, "sweep_dims": [4, 16],
    "sweep_sigmas": [0.25, 0.5], "sweep_seeds": 2, "sweep_n_train": 100, "network_activations": ["tanh", "relu"],
    "network_width": 16, "network_epochs": 1, "network_seeds": 1,
}  # fmt: skip


CIFAR100, CIFAR10, GENOMICS = TABLES["table1"]
TRAINING = TEXT["robustness"]["genomics"]


def make_run(**changes):
    """Four classes in 12 dimensions that differ in the directions of largest variance; OOD between them."""
    rng = np.random.default_rng(0)
    scale, rotation, centres = np.geomspace(3.0, 0.05, 12), ortho_group.rvs(12, random_state=0), np.zeros((4, 12))
    centres[:, :3] = rng.normal(size=(4, 3)) * 8

    def draw(means, number):
        y = np.arange(number) % len(means)
        return torch.from_numpy((means[y] + rng.normal(size=(number, 12)) * scale) @ rotation), torch.from_numpy(y)

    (train, labels), (test, _), (ood, _) = draw(centres, 400), draw(centres, 150), draw(centres.mean(0)[None], 120)
    about = {"benchmark": "toy", "backbone": "identity", "ood_name": "middle"}
    features = {"train": train, "train_labels": labels, "test": test, "ood": ood}
    return studies.Run(**{**about, **features, **changes})


def make_training(benchmark="genomics:genomes"):
    areas = {"mahalanobis": [0.6, 0.66, 0.53], "rmd": [0.61, 0.68, 0.69], "msp": [0.6, 0.65, 0.66]}
    history = [
        {"stage": "fit", "epoch": 0, "step": 10 * (i + 1), "detector": d, "ood": o, "metric": m, "value": v}
        for d, values in areas.items()
        for i, value in enumerate(values)
        for o, m, v in (("middle", "AUROC", value), ("middle", "FPR95TPR", 0.3), ("mean", "AUROC", 0.1))
    ]
    accuracies = [(10, 0.7, 0.65), (20, 0.88, 0.82), (30, 0.99, 0.85)]
    return make_run(benchmark=benchmark, history=history, accuracies=accuracies)


def make_cell(line):
    values = {"mahalanobis": 0.75, "rmd": 0.8}
    rows = [make_row("b", "near", "n", name, 0, "AUROC", value, distance="near") for name, value in values.items()]
    # a far set must not be taken for the near one
    rows.insert(0, make_row("b", "far", "n", "rmd", 0, "AUROC", 0.01, distance="far"))
    rows.append(make_row("b", "", "n", "", 0, "ACC", 0.9))
    return make_run(line=line, rows=make_rows(rows), setting="a small net", reason="less data")


def by_metric(result):
    return pd.DataFrame(result.numbers).set_index("metric")


# -- tables and trainings ---------------------------------------------------------------------------------------------


def test_every_line_of_a_table_appears_with_a_number_or_a_reason():
    absent = {CIFAR10: "no GPU"}
    result = studies.table_study("table1", [make_cell(CIFAR100)], absent)
    numbers = pd.DataFrame(result.numbers).set_index(["line", "metric"])
    assert set(numbers.index.get_level_values(0)) == set(TABLES["table1"])
    ours = numbers.loc[CIFAR100, "AUROC of RMD"]
    assert (ours.paper, ours.ours, ours.setting, ours.reason) == (81.01, 80.0, "a small net", "less data")
    assert numbers.loc[CIFAR100, "accuracy"].ours == 90
    assert math.isnan(numbers.loc[CIFAR100, "AUROC of MSP"].ours)  # it has no row
    assert numbers.loc[CIFAR10, "AUROC of MD"].reason == "no GPU"
    assert "scale=paper" in numbers.loc[GENOMICS, "AUROC of MD"].reason


def test_a_training_is_compared_at_the_best_of_md_and_at_the_end():
    numbers = by_metric(studies.robustness_study([make_training()]))
    assert numbers.ours["best AUROC of MD while training"] == pytest.approx(66)
    assert numbers.paper["best AUROC of MD while training"] == TRAINING["best AUROC of MD while training"]
    assert numbers.ours["AUROC of MD at the end"] == pytest.approx(53)
    assert math.isnan(numbers.paper["AUROC of RMD at the end"])
    assert numbers.ours["held-out accuracy at the best AUROC of MD"] == pytest.approx(82)
    assert numbers.ours["training accuracy at the end"] == pytest.approx(99)
    assert numbers.paper["training accuracy at the end"] == TRAINING["training accuracy at the end"]
    # another benchmark claims no number of the paper
    assert by_metric(studies.robustness_study([make_training("digits")])).paper.isna().all()


# -- directions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discriminative", [False, True])
def test_terms_along_the_directions_add_up_to_the_distances_of_the_textbook(discriminative):
    run = make_run()
    directions = studies.fit_directions(run.moments, discriminative=discriminative)
    distance, relative = studies.direction_terms(directions, run.ood)
    data = run.train.numpy(), run.train_labels.numpy(), run.ood.numpy()
    np.testing.assert_allclose(distance.double().sum(1).numpy(), mahalanobis(*data), rtol=1e-5)
    if discriminative:  # where both covariances are diagonal
        np.testing.assert_allclose(relative.double().sum(1).numpy(), rmd(*data), rtol=1e-4, atol=1e-4)


def test_directions_are_eigenvectors_of_the_within_class_covariance_by_size():
    run = make_run()
    directions = studies.fit_directions(run.moments)
    z, y = run.train.numpy(), run.train_labels.numpy()
    centred = np.concatenate([z[y == k] - z[y == k].mean(0) for k in np.unique(y)])
    values, vectors = np.linalg.eigh(centred.T @ centred / len(z))
    cosine = np.abs((directions.projection.numpy() * np.sqrt(values[::-1])).T @ vectors[:, ::-1])
    np.testing.assert_allclose(np.diag(cosine), 1.0, atol=1e-6)
    # the background of a direction is the Gaussian of all samples along it
    torch.testing.assert_close(directions.project(run.train).var(0, correction=0), directions.background)


@pytest.mark.parametrize("components", [1, 12])
def test_cumulative_pmd_is_that_of_the_detector(components):
    run = make_run()
    largest, smallest = studies.cumulative_scores(studies.fit_directions(run.moments), run.ood)
    detector = PartialMahalanobis(components=components).fit_features(run.train, run.train_labels)
    torch.testing.assert_close(largest[:, components - 1], detector.predict_features(run.ood))
    detector = PartialMahalanobis(components=components - 1, largest=False).fit_features(run.train, run.train_labels)
    torch.testing.assert_close(smallest[:, components - 1], detector.predict_features(run.ood))


def test_the_curves_of_pmd_end_at_md():
    result = studies.partial_study([make_run()])
    areas = {record["detector"]: record["value"] for record in result.records if record["metric"] == "AUROC"}
    largest, smallest = (result.arrays[f"toy, identity//{name}"] for name in ("largest", "smallest"))
    assert largest[-1] == pytest.approx(areas["mahalanobis"], abs=1e-12)
    assert smallest[0] == pytest.approx(areas["mahalanobis"], abs=1e-12)
    assert areas["partial"] == largest.max()
    assert areas["rmd"] > areas["mahalanobis"]


def test_the_spectrum_of_the_simulation_has_one_leading_direction():
    result = studies.spectrum_study([simulated_run(dim=64, n_train=500, n_test=100)])
    assert int(result.arrays["simulation, identity//threshold"]) == 1
    relative = result.arrays["simulation, identity//rmd/ood/mean"]
    assert relative[0] > 20
    assert np.abs(relative[1:]).max() < 1e-6  # the other directions cancel exactly


def test_untrained_flows_give_the_ranking_of_the_gaussians_that_they_start_from():
    result = studies.flow_study([make_run()], {"max_epochs": 0})
    areas = {record["detector"]: record["value"] for record in result.records}
    assert areas["flow_likelihood"] == pytest.approx(areas["mahalanobis"], abs=2e-3)
    assert areas["relative_flow"] == pytest.approx(areas["rmd"], abs=2e-3)


# -- simulation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "shift"), [(1, 1.0), (64, 4.0)])
def test_the_limit_of_md_agrees_with_sampling(dim, shift):
    rng = np.random.default_rng(1)
    id_scores, ood_scores = rng.chisquare(dim, 40_000), rng.noncentral_chisquare(dim, shift**2, 40_000)
    assert limit_auroc(dim, shift) == pytest.approx(np.mean(id_scores < ood_scores), abs=0.01)


@pytest.mark.slow
def test_the_papers_simulation_comes_out_within_its_tolerance():
    runs = [simulated_run(seed=seed).rate_gaussians("mahalanobis", "rmd") for seed in range(20)]
    assert 100 * np.mean([run["mahalanobis"][0] for run in runs]) == pytest.approx(83.13, abs=1.5)
    assert np.mean([run["rmd"][0] for run in runs]) == pytest.approx(1.0, abs=1e-4)


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results():
    run = make_run()
    return {
        "simulation": simulation_study(OmegaConf.create(TOY_SIMULATION)),
        "spectrum": studies.spectrum_study([run]),
        "partial": studies.partial_study([run]),
        "flows": studies.flow_study([run], {"max_epochs": 0}),
        "robustness": studies.robustness_study([make_training()]),
        "table1": studies.table_study("table1", [make_cell(CIFAR100)], {}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("study", ["simulation", "spectrum", "partial", "flows", "robustness", "table1"])
def test_every_study_has_pictures_whose_axes_are_named(results, study, tmp_path):
    figures = make_figures(results[study])
    assert figures
    for name, (figure, caption) in figures.items():
        assert caption
        save_figure(figure, tmp_path / name, formats=("png",))
        for axes in figure.axes:
            shared = [other.get_xlabel() for other in axes.get_shared_x_axes().get_siblings(axes)]
            assert any(shared) or study == "spectrum"
