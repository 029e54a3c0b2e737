"""Lets any Hydra app choose ``callbacks: [default, ood_monitor]`` once rmd-plugin is installed."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class RmdSearchPath(SearchPathPlugin):
    """Appends our shared configs to the search path; the app's own configs keep precedence."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add ``conf/shared``, and nothing else of ours: our experiments must not show up in foreign apps."""
        from rmd_plugin.files import config_path

        search_path.append(provider="rmd-plugin", path=config_path("shared"))
