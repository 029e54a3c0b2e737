"""``rmd-reproduce``: the paper's tables and figures, each one command, side by side with the published numbers."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from rmd_plugin.app.configs import config_path, register_resolvers
from rmd_plugin.paper.experiments import SCALES, list_studies

register_resolvers()


@hydra.main(version_base="1.3", config_path=config_path(), config_name="reproduce")
def main(config: DictConfig) -> None:
    """List the studies, or run those that the config names."""
    # torch is imported only to run something: --help and the list take a second
    if config.study is None and config.document is None and config.scale in SCALES:
        list_studies(Path(str(config.output)))
        return
    from rmd_plugin.paper.reproduce_job import run

    run(config)


if __name__ == "__main__":
    main()
