"""The versions that a generated page names."""

import importlib.metadata
from collections.abc import Iterable


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions without their local labels, such as +cpu."""
    return {name: importlib.metadata.version(name).partition("+")[0] for name in packages}
