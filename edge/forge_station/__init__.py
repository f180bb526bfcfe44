"""forge_station: what a visual inspection station runs, from trigger to verdict.

It knows nothing of training (`training/`) or of model export (`export/`); they meet in files.
"""

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The installed version, or "0+checkout" when it runs from a source tree not installed."""
    try:
        return metadata.version("forge-station")
    except metadata.PackageNotFoundError:
        return "0+checkout"


__all__ = ["version"]
