"""The drift watch: readings, scores, scan quality and rates of a running station on control charts.

It sees every verdict, learns in Phase I what is usual for each product, and then charts subgroup
means (CUSUM and EWMA), rates (CUSUM of FAIL and of UNSURE) and golden parts. Three levels:

    1 watch     one chart of one signal is beyond its limit
    2 act       both charts of a signal, charts of two signals, or a rate at 1.5 times its limit
    3 withhold  a sum at twice its limit, or a golden part missed: no PASS until a person releases

It never says PASS itself: level 3 is an objection to the permit. It knows neither MQTT nor alarms.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from forge_station.assurance.charts import Cusum, Ewma, RateCusum
from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.contract.record import Count, Limit
from forge_station.contract.verdict import CERTIFICATE, GATE, Outcome, Verdict, combine
from forge_station.mes import state_file
from forge_station.mes.stamp import utc_now

log = logging.getLogger(__name__)

CUSUM, EWMA = Cusum(), Ewma()
RATE_LIMIT = 7.0
"""Of the CUSUM of a rate whose odds triple."""
ACT, WITHHOLD = 1.5, 2.0
"""Shares of a limit from which a rate is level 2, and any sum level 3."""
CORRELATED = 0.2
"""Correlation of neighbouring subgroups from which run lengths no longer hold."""
GOLDEN_HISTORY, GOLDEN_LEAST = 50, 5
SIGNALS = ("score", "reading", "valid_share", "saturated_share", "blur_px")
# Smallest spread that is taken seriously, so that a figure that hardly moves gives no alarm.
_FLOOR = {"score": 0.05, "reading": 0.05, "px": 0.01, "share": 0.002}
_ODDS = 30.0


@dataclass(frozen=True)
class DriftConfig:
    """`drift` in the station file."""

    phase1_parts: Annotated[int, Limit(200, 1_000_000)] = 5000
    """Parts of a product from which its usual state is learnt."""
    subgroup: Annotated[int, Limit(2, 1000)] = 50
    """Parts a point of a chart."""
    signals: tuple[str, ...] = SIGNALS
    """`score`, `reading`, or names of figures of the verdict's `scan.quality`."""
    golden: Mapping[str, Literal["PASS", "FAIL"]] = field(default_factory=dict)
    """Serial number of a master part -> what the checks must say of it."""

    def __post_init__(self) -> None:
        record.check(self)
        if self.phase1_parts < 25 * self.subgroup:
            raise ContractError(
                "too few parts to learn from", which="drift.phase1_parts",
                expected=f"25 subgroups or more, {25 * self.subgroup}", got=self.phase1_parts,
            )  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """One signal of one product. In Phase I `centre` is None and `first` grows."""

    total: float = 0.0
    count: Count = 0
    first: tuple[float, ...] = ()
    centre: float | None = None
    spread: float = 1.0
    correlation: float = 0.0
    high: float = 0.0
    low: float = 0.0
    ewma: float = 0.0
    points: Count = 0

    @property
    def beyond(self) -> tuple[bool, bool]:
        """Whether CUSUM and EWMA are beyond their limits."""
        return max(self.high, self.low) > CUSUM.h, abs(self.ewma) > EWMA.bound


@dataclass(frozen=True)
class Rate:
    """One event of one product. In Phase I `usual` is None."""

    parts: Count = 0
    events: Count = 0
    usual: float | None = None
    sum: float = 0.0


@dataclass(frozen=True)
class Golden:
    """A master part: when it was last as it must be, and its scores then."""

    passed: str = ""
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class Latch:
    """Level 3: since when, and why."""

    since: str
    why: str


@dataclass(frozen=True)
class Order:
    """What a person orders by `forge-station drift`."""

    action: Literal["release", "relearn"]
    by: str
    reason: str
    time: str


@dataclass(frozen=True)
class State:
    """All that outlives the process. `model`: digest of the bundle that the scores are of."""

    model: str = ""
    streams: Mapping[str, Mapping[str, Stream]] = field(default_factory=dict)
    """Product -> signal -> its stream."""
    rates: Mapping[str, Mapping[str, Rate]] = field(default_factory=dict)
    golden: Mapping[str, Golden] = field(default_factory=dict)
    latch: Latch | None = None
    orders: tuple[Order, ...] = ()
    """What was ordered and done, the oldest first."""
    schema: Literal["forge-station.drift/1.0"] = "forge-station.drift/1.0"


class Watch:
    """The watch of one station; called by one thread. `path`: where its state is kept.

    No method raises for the disk. A state that cannot be read is level 3: nobody knows what it was.
    """

    def __init__(self, config: DriftConfig, path: Path, clock: Callable[[], str] = utc_now) -> None:
        self.config, self.path, self._clock = config, path, clock
        try:
            self.state = read_state(path)
        except ContractError as error:
            why = f"the state of the drift watch is lost: {' '.join(str(error).split())}"
            self.state = State(latch=Latch(clock(), why))
            log.error("%s", why)

    @property
    def level(self) -> int:
        """0 (nothing) to 3, see the module."""
        return 3 if self.state.latch is not None else self._of_charts()[0]

    @property
    def objection(self) -> str | None:
        """Why no part may be called PASS; None below level 3."""
        latch = self.state.latch
        return None if latch is None else f"drift since {latch.since}: {latch.why}"

    @property
    def text(self) -> str:
        """What is beyond its limit, for people."""
        if self.objection is not None:
            return self.objection
        return "; ".join(self._of_charts()[1]) or "nothing has changed"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the charts less trustworthy than their run lengths say."""
        return tuple(
            f"{product}: subgroups of {name} are correlated ({stream.correlation:.2f}), so false "
            "alarms come more often; enlarge drift.subgroup"
            for product, own in self.state.streams.items()
            for name, stream in own.items()
            if stream.correlation > CORRELATED
        )

    def part(self, verdict: Verdict) -> int:
        """Take a verdict in; the level after it. ERROR parts say nothing of drift."""
        if verdict.outcome is Outcome.ERROR:
            return self.level
        before = self.state
        if verdict.serial in self.config.golden:
            self._golden(verdict)
        else:
            self._model(verdict)
            self._signals(verdict)
            self._rates(verdict)
            _, told, withhold = self._of_charts()
            if withhold and self.state.latch is None:
                self._latch("; ".join(told))
        if before.latch is not self.state.latch or self._closed(before):
            self.save()
        return self.level

    def obey(self) -> Order | None:
        """Do what a person ordered since; None: nothing, or not yet (see `refusal`)."""
        order = read_order(order_path(self.path))
        if order is None or self.refusal(order) is not None:
            return None
        state = replace(self.state, latch=None, orders=(*self.state.orders, order))
        if order.action == "relearn":
            state = replace(state, streams={}, rates={}, golden={})
        else:
            state = replace(state, streams=_calmed(state.streams), rates=_reset(state.rates))
        self.state = state
        self.save()
        order_path(self.path).unlink(missing_ok=True)
        log.warning("drift watch: %s by %s: %s", order.action, order.by, order.reason)
        return order

    def refusal(self, order: Order) -> str | None:
        """Why an order is not obeyed yet: a release needs every golden part right since level 3."""
        latch = self.state.latch
        if order.action == "relearn" or latch is None:
            return None
        waiting = [
            serial
            for serial in self.config.golden
            if self.state.golden.get(serial, Golden()).passed <= latch.since
        ]
        if not waiting:
            return None
        return f"golden parts to be inspected and found right first: {', '.join(waiting)}"

    def failed(self, error: Exception) -> None:
        """The watch itself broke: what nobody watches is not called PASS."""
        self._latch(f"the drift watch failed: {error!r}")
        self.save()

    def save(self) -> None:
        """Write the state; a fault of the disk is logged, what is in memory still counts."""
        try:
            state_file.write(self.path, record.write(self.state))
        except OSError as error:
            log.error("the state of the drift watch cannot be stored in %s: %s", self.path, error)

    def _latch(self, why: str) -> None:
        if self.state.latch is None:
            self.state = replace(self.state, latch=Latch(self._clock(), why[:1000]))
            log.warning("drift, no part is called PASS: %s", why)

    def _closed(self, before: State) -> bool:
        """Whether a subgroup ended or a golden part was seen: what is worth a disk flush."""
        if before.golden != self.state.golden or before.model != self.state.model:
            return True
        return any(
            stream.count == 0 and stream is not before.streams.get(product, {}).get(name)
            for product, own in self.state.streams.items()
            for name, stream in own.items()
        )

    def _model(self, verdict: Verdict) -> None:
        """Scores of another bundle are another signal: their Phase I begins anew."""
        model = "" if verdict.model is None else verdict.model.sha256
        if not model or model == self.state.model:
            return
        if self.state.model:
            log.warning("drift watch: the bundle changed, scores and rates are learnt anew")
        kept = {
            product: {n: s for n, s in own.items() if n not in ("score", "reading")}
            for product, own in self.state.streams.items()
        }
        self.state = replace(self.state, model=model, streams=kept, rates={}, golden={})

    def _signals(self, verdict: Verdict) -> None:
        own = dict(self.state.streams.get(verdict.product, {}))
        values = signals_of(verdict)
        for name in self.config.signals:
            if name in values:
                own[name] = self._point(name, own.get(name, Stream()), values[name])
        self.state = replace(self.state, streams={**self.state.streams, verdict.product: own})

    def _point(self, name: str, stream: Stream, value: float) -> Stream:
        stream = replace(stream, total=stream.total + value, count=stream.count + 1)
        if stream.count < self.config.subgroup:
            return stream
        mean = stream.total / stream.count
        stream = replace(stream, total=0.0, count=0)
        if stream.centre is None:
            first = (*stream.first, mean)
            if len(first) * self.config.subgroup < self.config.phase1_parts:
                return replace(stream, first=first)
            return learnt(name, first)
        z = (mean - stream.centre) / stream.spread
        high, low = CUSUM.step(stream.high, stream.low, z)
        ewma = EWMA.step(stream.ewma, z)
        return replace(stream, high=high, low=low, ewma=ewma, points=stream.points + 1)

    def _rates(self, verdict: Verdict) -> None:
        own = dict(self.state.rates.get(verdict.product, {}))
        outcome = _own_outcome(verdict)
        for name in (Outcome.FAIL, Outcome.UNSURE):
            own[name.value] = self._event(own.get(name.value, Rate()), outcome is name)
        self.state = replace(self.state, rates={**self.state.rates, verdict.product: own})

    def _event(self, rate: Rate, event: bool) -> Rate:
        if rate.usual is not None:
            return replace(rate, sum=rate_chart(rate.usual).step(rate.sum, event))
        rate = replace(rate, parts=rate.parts + 1, events=rate.events + event)
        if rate.parts < self.config.phase1_parts:
            return rate
        return replace(rate, usual=(rate.events + 1) / (rate.parts + 2))

    def _golden(self, verdict: Verdict) -> None:
        """A master part: its verdict exactly, its score within three sigma of its own history."""
        serial, expected = verdict.serial, Outcome(self.config.golden[verdict.serial])
        known = self.state.golden.get(serial, Golden())
        found, score = _checks_outcome(verdict), _score(verdict)
        if found is not expected:
            self._latch(f"golden part {serial} must be {expected}, the checks say {found}")
            return
        if score is not None and len(known.scores) >= GOLDEN_LEAST:
            mean = statistics.fmean(known.scores)
            spread = max(statistics.stdev(known.scores), _FLOOR["score"])
            if abs(score - mean) > 3.0 * spread:
                self._latch(
                    f"golden part {serial} scores {score:.2f}, usually {mean:.2f} +- {spread:.2f}"
                )
                return
        scores = known.scores if score is None else (*known.scores, score)[-GOLDEN_HISTORY:]
        seen = Golden(self._clock(), scores)
        self.state = replace(self.state, golden={**self.state.golden, serial: seen})

    def _of_charts(self) -> tuple[int, list[str], bool]:
        """(level without the latch, what is beyond its limit, whether PASS must be withheld)."""
        level, withhold = 0, False
        told: list[str] = []
        for product, own in self.state.streams.items():
            for name, stream in own.items():
                beyond = stream.beyond
                if any(beyond):
                    level = max(level, 2 if all(beyond) or told else 1)
                    worst = max(stream.high, stream.low)
                    withhold |= worst > WITHHOLD * CUSUM.h
                    way = "up" if stream.high > stream.low else "down"
                    told.append(f"{product}: {name} went {way} (CUSUM {worst:.1f} of {CUSUM.h:g})")
        for product, rates in self.state.rates.items():
            for name, rate in rates.items():
                if rate.sum > RATE_LIMIT:
                    level = max(level, 2 if rate.sum > ACT * RATE_LIMIT or told else 1)
                    withhold |= rate.sum > WITHHOLD * RATE_LIMIT
                    told.append(
                        f"{product}: {name} more often than the usual {100 * (rate.usual or 0):.1f}"
                        f" % (CUSUM {rate.sum:.1f} of {RATE_LIMIT:g})"
                    )
        return level, told, withhold


def rate_chart(usual: float) -> RateCusum:
    """The chart of an event that is usually so frequent: for odds that triple."""
    return RateCusum(usual, 3.0 * usual / (1.0 + 2.0 * usual), RATE_LIMIT)


def learnt(name: str, means: tuple[float, ...]) -> Stream:
    """The stream after Phase I: mean, and standard deviation of the subgroup means.

    Robustly: median and MAD find the means that stand out (3.5 sigma), which are left out. So a
    single disturbed subgroup does not widen the limits.
    """
    middle = statistics.median(means)
    mad = 1.4826 * statistics.median(abs(mean - middle) for mean in means)
    kept = [mean for mean in means if abs(mean - middle) <= 3.5 * mad] or list(means)
    centre = statistics.fmean(kept)
    spread = statistics.stdev(kept) if len(kept) > 1 else 0.0
    off = [mean - centre for mean in kept]
    square = math.fsum(value * value for value in off)
    neighbours = math.fsum(a * b for a, b in itertools.pairwise(off))
    floor = _FLOOR.get(name) or _FLOOR.get(name.rpartition("_")[2], 1e-3)
    return Stream(
        centre=centre,
        spread=max(spread, floor),
        correlation=neighbours / square if square > 0 else 0.0,
    )


def signals_of(verdict: Verdict) -> dict[str, float]:
    """Signal -> value of one part.

    `score`: of a part that the checks pass (the margin of the PASS stream). `reading`: log-odds of
    the least certain reading. The others: figures of scan quality that this scanner gives.
    """
    found = {name: value for name, value in verdict.scan.quality.items() if value is not None}
    score = _score(verdict)
    if score is not None and _checks_outcome(verdict) is Outcome.PASS:
        found["score"] = max(-_ODDS, min(_ODDS, score))
    if verdict.parts:
        least = min(part.probability for part in verdict.parts)
        edge = math.exp(-_ODDS)
        found["reading"] = math.log(max(least, edge)) - math.log(max(1.0 - least, edge))
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _score(verdict: Verdict) -> float | None:
    return None if verdict.certification is None else verdict.certification.score


def _checks_outcome(verdict: Verdict) -> Outcome:
    """Of gate and checks, whatever the certificate says: an advisory station never says PASS."""
    checks = [item for item in verdict.checks if item.check != CERTIFICATE]
    required = [item for item in verdict.required if item not in (CERTIFICATE, GATE)]
    return combine(required, checks)[0]


def _own_outcome(verdict: Verdict) -> Outcome:
    """As it was told; of an advisory station that of the checks, so that a lost certificate is no
    rise of UNSURE."""
    advisory = verdict.certification is not None and verdict.certification.mode == "advisory"
    return _checks_outcome(verdict) if advisory else verdict.outcome


def _calmed(streams: Mapping[str, Mapping[str, Stream]]) -> dict[str, dict[str, Stream]]:
    return {
        product: {n: replace(s, high=0.0, low=0.0, ewma=0.0) for n, s in own.items()}
        for product, own in streams.items()
    }


def _reset(rates: Mapping[str, Mapping[str, Rate]]) -> dict[str, dict[str, Rate]]:
    return {p: {n: replace(r, sum=0.0) for n, r in own.items()} for p, own in rates.items()}


def state_path(outbox: Path) -> Path:
    """Beside the outbox, as all that outlives a station's process."""
    return outbox.with_name(f"{outbox.name}.drift.json")


def order_path(state: Path) -> Path:
    """Where `forge-station drift` leaves an order for the running station."""
    return state.with_name(f"{state.name}.order")


def read_state(path: Path) -> State:
    """The state; the first one where there is no file. Raises ContractError."""
    data = _json(path)
    return State() if data is None else record.read(State, data, str(path))


def read_order(path: Path) -> Order | None:
    """The order that waits; None: none, or (with a word in the log) one that cannot be read."""
    try:
        data = _json(path)
        return None if data is None else record.read(Order, data, str(path))
    except ContractError as error:
        log.error("an order for the drift watch is not obeyed: %s", error)
        return None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError("cannot be read", which=path, got=error) from error
