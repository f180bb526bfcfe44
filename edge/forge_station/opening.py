"""Opens a bundle for inspection: its model, operating points and picture layout in one place.

The station, offline inspection and evaluation all start here. It inspects nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from forge_station.checks import Thresholds
from forge_station.contract.views import Layout
from forge_station.errors import BundleError, StationError
from forge_station.pipeline import Inspector
from forge_station.vlm.engine import AUTO
from forge_station.vlm.model import VisionLanguageModel

NO_OVERRIDES: Mapping[str, float] = MappingProxyType({})


def open_inspector(
    bundle: Path,
    *,
    overrides: Mapping[str, float] = NO_OVERRIDES,
    threads: int = 1,
    provider: str = AUTO,
    time_budget_s: float = 10.0,
) -> Inspector:
    """The bundle's model with its own thresholds and layout. The caller closes `.model`.

    `overrides`: thresholds of a station file, which replace those of the bundle; ContractError
    when they are wrong. BundleError for a bundle that is incomplete, edited or of another contract.
    """
    model = VisionLanguageModel.open(bundle, threads=threads, provider=provider)
    try:
        try:
            Thresholds.read(model.manifest.thresholds)
            layout = Layout(
                cell=int(model.manifest.model.get("cell_px", Layout.cell)),
                panel=int(model.manifest.model.get("panel_px", Layout.panel)),
            )
        except (StationError, TypeError, ValueError) as error:
            raise BundleError(
                "the bundle's settings are not valid", which=bundle / "manifest.json", got=error
            ) from error
        thresholds = Thresholds.read(model.manifest.thresholds, overrides)
    except StationError:
        model.close()
        raise
    return Inspector(model, thresholds, layout, time_budget_s)
