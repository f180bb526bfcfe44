"""The section `release` of a station file: whose bundles it takes, and how they are tried out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Count, Limit, NotNegative, Probability
from forge_station.signing import PublicKey


@dataclass(frozen=True)
class ReleaseConfig:
    """Whose bundles the station takes, and how a new one must prove itself (docs/BUNDLES.md)."""

    keys: tuple[PublicKey, ...] = ()
    """Release keys: PEM files or base64. None: those of `trusted_keys` count."""
    threshold: Annotated[int, Limit(1, 16)] = 1
    """How many of them must have signed a bundle."""
    unsigned: bool = False
    """Take bundles that nobody signed."""
    keep: Annotated[int, Limit(2, 100)] = 3
    """Bundles kept in the store, the active one and the one to go back to among them."""
    golden_required: bool = True
    """A deployment of a bundle without a golden set fails."""
    golden_grid_iou: Probability = 0.98
    """Mean agreement of the defect grids with those of the golden set."""
    golden_p99_ms: NotNegative | None = None
    """What a golden part may take; none: the time budget of the model, `runtime.time_budget_s`."""
    shadow_parts: Count = 20
    """Live parts that the new bundle judges beside the active one, without a say; 0: none."""
    shadow_disagree: Probability = 0.05
    """Share of them that it may judge differently."""
    trial_parts: Count = 50
    """Parts after which the new bundle, now active, is kept; 0: it is kept at once."""
    trial_fail_share: Probability = 0.5
    """Share of FAIL in the trial from which the old bundle comes back."""
    trial_unsure_share: Probability = 0.5
    """Share of UNSURE and ERROR in the trial from which the old bundle comes back."""
    trial_slower: Annotated[float, Limit(1.0, 100.0)] = 3.0
    """So many times the median duration of parts before is too slow."""
    trial_restarts: Count = 1
    """Starts of the station during a trial; one more, and the old bundle comes back."""
    timeout_s: Annotated[float, Limit(1.0, 2_592_000.0)] = 86_400.0
    """A deployment that is not active after so long is given up. A trial may take longer."""
    report_key: Path | None = None
    """The station's own private key (PEM): signs what it reports on a stick (docs/ROLLOUT.md)."""

    def __post_init__(self) -> None:
        record.check(self)
        ids = {key.id for key in self.keys}
        if self.keys and len(ids) < self.threshold:
            allowed = f"{self.threshold} different keys or more, as threshold says"
            raise ContractError(
                "the release section is not valid",
                faults=[Fault("keys", f"{len(ids)} keys", allowed)],
            )
