"""``rmd-compare``: detectors on a benchmark, from a checkpoint, a frozen backbone or a file of features."""

import hydra
from omegaconf import DictConfig

from rmd_plugin.app.configs import config_path, register_resolvers

register_resolvers()


@hydra.main(version_base="1.3", config_path=config_path(), config_name="compare")
def main(config: DictConfig) -> None:
    """Run one comparison; in a multirun Hydra calls this once per combination.

    Nothing is returned for sweepers that search: the numbers are of test data, and nobody should tune on those.
    """
    # torch is imported only here: --help takes a second
    from rmd_plugin.app.compare_job import run

    run(config)


if __name__ == "__main__":
    main()
