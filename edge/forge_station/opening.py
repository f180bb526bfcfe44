"""Opens a bundle for inspection: model, operating points, picture layout and permit in one place.

The station, offline inspection and evaluation all start here. It inspects nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from forge_station.bundles.trust import Trust
from forge_station.checks import Thresholds
from forge_station.contract import tasks
from forge_station.contract.views import Layout
from forge_station.errors import BundleError, StationError
from forge_station.geometry import reference_io
from forge_station.geometry.reference import Reference
from forge_station.permit import CHECKS_ALONE, read_permit
from forge_station.pipeline import Inspector
from forge_station.signing import PublicKey
from forge_station.vlm.engine import AUTO
from forge_station.vlm.grid_readout import Readout
from forge_station.vlm.model import VisionLanguageModel

NO_OVERRIDES: Mapping[str, float] = MappingProxyType({})


def open_inspector(
    bundle: Path,
    *,
    overrides: Mapping[str, float] = NO_OVERRIDES,
    threads: int = 1,
    provider: str = AUTO,
    spinning: bool = False,
    time_budget_s: float = 10.0,
    grid: Readout = "rows",
    trusted_keys: Sequence[PublicKey] = (),
    changed: Sequence[str] = (),
    checks_alone: bool = False,
    trust: Trust | None = None,
) -> Inspector:
    """The bundle's model with its own thresholds and layout. The caller closes `.model`.

    `overrides`: thresholds of a station file, which replace those of the bundle; ContractError
    when they are wrong. BundleError for a bundle that is incomplete, edited or of another contract.
    Without a valid certificate of one of the `trusted_keys` the inspector is advisory (permit.py);
    `changed` since it was made may void it. `checks_alone` is for evaluations: no certificate is
    looked for, what every check passes is PASS. `trust`: who must have signed the bundle; None:
    nobody.
    """
    prefix = tasks.TRUNK_OPEN + tasks.IMAGE_OPEN
    model = VisionLanguageModel.open(
        bundle, threads=threads, provider=provider, spinning=spinning, prefix=prefix, trust=trust
    )  # fmt: skip
    try:
        try:
            released = model.manifest.thresholds
            own = Thresholds.read(released)
            layout = Layout(
                cell=int(model.manifest.model.get("cell_px", Layout.cell)),
                panel=int(model.manifest.model.get("panel_px", Layout.panel)),
            )
        except (StationError, TypeError, ValueError) as error:
            raise BundleError(
                "the bundle's settings are not valid", which=bundle / "manifest.json", got=error
            ) from error
        thresholds = Thresholds.read(released, overrides)
        if thresholds.look_again < 1.0 and not model.manifest.training.get("closer_looks"):
            raise BundleError(
                "this bundle's model was not trained on closer looks",
                which=f"threshold look_again of {model.manifest.name}",
                expected="1 (never), or a bundle whose training card counts closer_looks",
                got=f"{thresholds.look_again:g}",
                action="leave look_again out, or train on a pool drawn with --closer-share",
            )
        references: Mapping[str, Reference] = {}
        if reference_io.FILE in model.manifest.files:
            references = reference_io.load(bundle / reference_io.FILE)
    except StationError:
        model.close()
        raise
    permit = CHECKS_ALONE
    if not checks_alone:
        permit = read_permit(bundle, model.manifest, trusted_keys, own, thresholds, changed)
    return Inspector(model, thresholds, layout, time_budget_s, grid, references, permit)
