"""``rmd-reproduce``: the paper's tables and figures, each one command, side by side with the published numbers."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from rmd_plugin.app.commands import CONF, run_command
from rmd_plugin.paper.studies import list_studies


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def _reproduce(config: DictConfig) -> None:
    # torch is imported only to run something: --help and the list take a second
    if config.study is None and config.document is None:
        list_studies(Path(str(config.output)))
        return
    from rmd_plugin.paper.reproduce_job import run

    run(config)


def main() -> None:
    """List the studies, or run those that the config names."""
    run_command(_reproduce, "rmd-reproduce")


if __name__ == "__main__":
    main()
