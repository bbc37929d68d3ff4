"""Appends lightning_sp's `conf/` to the search path of every Hydra application, behind the application's own.

Hydra runs this at the start of every application of an environment that holds this package, so the folder is given
by its place on disk: `pkg://lightning_sp.conf` would import lightning_sp, and with it torch and Lightning, in programs
that have no use for them, and would end those programs where that import fails.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningSpSearchPath(SearchPathPlugin):
    """The groups strategy, model, data, trainer, callbacks and experiment for users' own applications."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder; where lightning_sp is not to be found, leave the path as it is."""
        spec = importlib.util.find_spec("lightning_sp")  # finds a top-level package without importing it
        for location in (spec.submodule_search_locations or ()) if spec else ():
            conf = Path(location, "conf")
            if conf.is_dir():
                search_path.append(provider="lightning_sp", path=f"file://{conf.resolve()}")
