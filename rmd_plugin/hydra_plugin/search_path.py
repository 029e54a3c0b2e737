"""Lets any Hydra app choose ``callbacks: [default, ood_monitor]`` once rmd-plugin is installed."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rmd_plugin.app.configs import config_path


class RmdSearchPath(SearchPathPlugin):
    """Appends our shared configs to the search path; the app's own configs keep precedence."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add ``conf/shared``, and nothing else of ours: our experiments must not show up in foreign apps."""
        try:
            root = config_path()
        except FileNotFoundError:  # a broken install of ours must not disturb somebody else's app
            return
        if root.startswith("pkg://"):
            search_path.append(provider="rmd-plugin", path=f"{root}.shared")
        else:
            search_path.append(provider="rmd-plugin", path=f"file://{root}/shared")
