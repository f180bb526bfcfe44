"""What the station says, followed: the board beside the outbox, as events for the page."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_station.config import StationConfig


@dataclass
class Feed:
    """Reads only, waits for nobody."""

    outbox: Path
    evidence: Path
    boot: str = field(default_factory=lambda: secrets.token_hex(4))

    @classmethod
    def of(cls, config: StationConfig) -> Feed:
        return cls(config.outbox, config.evidence.folder)

    def snapshot(self) -> dict[str, Any]:
        return {"boot": self.boot}

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        yield
