"""The textbook in numpy: float64, one formula per line, no shared code with the package."""

import numpy as np
from scipy.linalg import solve_triangular


def moments(z, y):
    """Class means, Sigma, mu_0, Sigma_0 and Sigma_B as the paper writes them."""
    z, y = np.asarray(z, dtype=np.float64), np.asarray(y)
    z, y = z[y >= 0], y[y >= 0]
    classes = np.unique(y)
    means = {k: z[y == k].mean(0) for k in classes}
    within = np.stack([z[i] - means[y[i]] for i in range(len(z))])
    mu_0 = z.mean(0)
    sigma = within.T @ within / len(z)
    sigma_0 = (z - mu_0).T @ (z - mu_0) / len(z)
    between = sum((y == k).mean() * np.outer(means[k] - mu_0, means[k] - mu_0) for k in classes)
    return means, sigma, mu_0, sigma_0, between


def distance(x, mu, sigma):
    """Squared Mahalanobis distance."""
    difference = (np.asarray(x, dtype=np.float64) - mu).T
    return (solve_triangular(np.linalg.cholesky(sigma), difference, lower=True) ** 2).sum(0)


def class_distances(z, y, x):
    means, sigma, *_ = moments(z, y)
    return np.stack([distance(x, means[k], sigma) for k in sorted(means)], axis=1)


def mahalanobis(z, y, x):
    return class_distances(z, y, x).min(1)


def marginal(z, y, x):
    _, _, mu_0, sigma_0, _ = moments(z, y)
    return distance(x, mu_0, sigma_0)


def rmd(z, y, x):
    return mahalanobis(z, y, x) - marginal(z, y, x)


def partial(z, y, x, components, largest=True):
    means, sigma, *_ = moments(z, y)
    values, vectors = np.linalg.eigh(sigma)
    order = np.argsort(values)[::-1]
    chosen = order[:components] if largest else order[components:]
    scores = []
    for k in sorted(means):
        coordinates = (np.asarray(x, dtype=np.float64) - means[k]) @ vectors[:, chosen]
        scores.append((coordinates**2 / values[chosen]).sum(1))
    return np.stack(scores, axis=1).min(1)


def auroc(id_scores, ood_scores):
    """Probability that an OOD sample scores higher than an ID sample, by counting pairs."""
    id_scores, ood_scores = np.asarray(id_scores)[:, None], np.asarray(ood_scores)[None]
    return (ood_scores > id_scores).mean() + 0.5 * (ood_scores == id_scores).mean()
