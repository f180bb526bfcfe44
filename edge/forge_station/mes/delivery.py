"""What the publisher is given and what it tells: a connection, how patient to be, how it goes.

Plain types; `publisher` uses them, `link` is the connection of production.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_station.mes.link import Emit, Inbound, Outgoing
from forge_station.mes.topics import MqttConfig


class Connection(Protocol):
    """What the publisher needs of `link.Link`."""

    session_present: bool
    window: int
    maximum_packet_bytes: int | None

    def publish(self, message: Outgoing) -> int: ...
    def subscribe(self, filters: Sequence[str], *, as_published: bool = True) -> None: ...
    @property
    def alive(self) -> bool: ...
    def close(self) -> None: ...
    def drop(self) -> None: ...


STALL_KEEPALIVES = 1.8
"""Nothing confirmed for so many keepalives: the connection is dead, whatever TCP says. Less than 2,
within which an idle one is noticed, so that 2 is the limit for both."""

GOODBYE_S = 1.0
"""So long a publisher that ends waits for what is still on its way."""

Connect = Callable[[MqttConfig, Outgoing, Emit], Connection]
Handler = Callable[[Inbound], None]


@dataclass(frozen=True)
class Timing:
    """How patient the publisher is, in seconds."""

    stall_s: float | None = None
    """Nothing confirmed for so long with messages on their way: reconnect. None: 1.8 keepalives."""
    settle_s: float = 2.0
    """Wait after a connect to a broker that lost its memory, so that consumers are back as well:
    not every broker says 0x10. Without it 376 of 3055 rows were lost in 8 restarts of iotcore."""
    resend_s: float = 2.0
    """What such a broker had confirmed in the last so many seconds is sent again; 0: nothing."""
    reconnect_s: tuple[float, float] = (1.0, 30.0)
    """Wait before the next attempt to connect, doubling from the first to the second figure; of
    every wait a random share of up to one half is left out."""
    no_consumer_s: tuple[float, float] = (1.0, 30.0)
    """The same between two attempts to send in a stream that nobody subscribes to."""
    taken_over_s: float = 60.0
    """The same when another client has taken the station's id."""


@dataclass(frozen=True)
class Stats:
    """Since the start of this publisher. `waiting_for_consumer`: streams nobody subscribes to, or
    every stream while the consumer of record is silent. `acked`: confirmed by the broker."""

    connected: bool
    published: int
    acked: int
    held: int
    dead: int
    in_flight: int
    connects: int
    window: int
    waiting_for_consumer: tuple[str, ...]
    last_error: str | None
    taken_over: bool = False
    """Another client has the station's id at the broker."""
