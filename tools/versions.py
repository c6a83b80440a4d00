"""The versions that a generated page names."""

import importlib.metadata
from collections.abc import Iterable


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Without what says how a package was built."""
    return {name: importlib.metadata.version(name).partition("+")[0] for name in packages}
