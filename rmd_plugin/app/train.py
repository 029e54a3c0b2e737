"""``rmd-train``: train a backbone on a benchmark, watch its detectors, compare them, write a report."""

import hydra
from omegaconf import DictConfig

from rmd_plugin.app.configs import config_path, register_resolvers

register_resolvers()


@hydra.main(version_base="1.3", config_path=config_path(), config_name="train")
def main(config: DictConfig) -> float | None:
    """Run one job; in a multirun Hydra calls this once per combination.

    Returns:
        The best validation accuracy, for sweepers that search. It does not depend on any OOD data.
    """
    # torch and Lightning are imported only here: --help takes a second
    from rmd_plugin.app.training_job import run

    return run(config)


if __name__ == "__main__":
    main()
