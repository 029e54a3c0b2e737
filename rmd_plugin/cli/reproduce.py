"""``rmd-reproduce``: the paper's tables and figures, each one command, side by side with the published numbers."""

import hydra
from omegaconf import DictConfig

from rmd_plugin.cli.configs import config_path, register_resolvers

register_resolvers()


@hydra.main(version_base="1.3", config_path=config_path(), config_name="reproduce")
def main(config: DictConfig) -> None:
    """List the studies, or run those that the config names."""
    # torch is imported only here: --help takes a second
    from rmd_plugin.cli.reproduce_job import run

    run(config)


if __name__ == "__main__":
    main()
