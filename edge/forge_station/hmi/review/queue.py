"""The review queue: what is drawn, who looks at what, what they said, and who may know what.

Two append-only files hold all of it, and are read when the queue is opened:

    labels.jsonl    what people said (labels.py)
    queue.jsonl     seed, draws, looks, reveals, gold: how it came about

A look belongs to one person. Its first answer is blind, since nothing of the verdict is given away
before it is on the disk; from the reveal on whatever that person says of the part is informed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.contract.label import Label
from forge_station.contract.verdict import Outcome
from forge_station.errors import StationError
from forge_station.evidence.index import Row
from forge_station.hmi.review import draw as chance
from forge_station.hmi.review import labels as words
from forge_station.hmi.review.draw import Draw
from forge_station.hmi.review.labels import Answer, Painted
from forge_station.hmi.review.log import Log, ReviewError
from forge_station.hmi.review.settings import ReviewSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

LABELS, QUEUE = "labels.jsonl", "queue.jsonl"
LEASE = timedelta(minutes=10)
"""A look that nobody answered is given to others after."""
LATE = timedelta(minutes=10)
"""Evidence may come to the disk so much later than its verdict."""
LookKind = Literal["first", "second", "gold", "adjudicate"]


class Parts(Protocol):
    """What the queue asks of the evidence."""

    def since(self, time: str) -> list[Row]:
        """Parts of that time and later that can be shown."""

    def there(self, result_id: str) -> bool:
        """Whether the part can still be shown."""

    def keep(self, result_id: str, mark: Literal["labelled", "held"]) -> None:
        """Delete it late, or never."""


@dataclass(frozen=True)
class Look:
    """One person looks at one part."""

    id: str
    """Says nothing of the part, nor of the look before."""
    kind: LookKind
    result_id: str
    reviewer: str
    role: str
    time: str


@dataclass(frozen=True)
class Gold:
    """A part whose truth is known."""

    result_id: str
    product: str
    truth: Literal["OK", "NG"]
    by: str


class Queue:
    """All methods may be called from any thread. Raises ReviewError."""

    def __init__(
        self,
        folder: Path,
        parts: Parts,
        settings: ReviewSettings,
        *,
        pass_share: float = 1.0,
        masters: Mapping[str, Literal["OK", "NG"]] | None = None,
        on_screen: Callable[[], str] = lambda: "",
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        """`pass_share`: of the station's evidence. `masters`: serial -> truth of golden parts.
        `on_screen`: the part whose verdict the live screen shows now; nobody is asked of it."""
        if settings.audit_share is not None and settings.audit_share > pass_share:
            raise ReviewError(
                "more PASS parts are to be audited than are kept", which="hmi.review.audit_share",
                expected=f"at most evidence.pass_share, {pass_share:g}", got=settings.audit_share,
                action="raise evidence.pass_share, or audit fewer",
            )  # fmt: skip
        self.settings = settings
        self._parts, self._pass_share, self._now = parts, pass_share, now
        self._on_screen = on_screen
        self._masters = dict(masters or {})
        self._lock = threading.RLock()
        self._seed = ""
        self._draws: dict[str, Draw] = {}
        self._waiting: set[str] = set()
        """Drawn, and not done with."""
        self._looks: dict[str, Look] = {}
        self._open: dict[str, Look] = {}
        """Reviewer -> the look that they have not answered."""
        self._told: set[str] = set()
        """Looks after which the verdict was shown."""
        self._gold: dict[str, Gold] = {}
        self._gone: set[str] = set()
        self._seen: set[tuple[str, str]] = set()
        self._all: list[Label] = []
        self._said: dict[str, list[Label]] = defaultdict(list)
        self._keys: dict[str, Label] = {}
        self._until = ""
        with ExitStack() as held:
            held.callback(os.close, _only(folder))
            self._labels = held.enter_context(closing(Log(folder / LABELS)))
            self._log = held.enter_context(closing(Log(folder / QUEUE)))
            self._recall()
            if not self._seed:
                self._note("seed", seed=secrets.token_hex(16))
            self._hear()
            self._held = held.pop_all()

    def close(self) -> None:
        with self._lock:
            self._held.close()

    # What there is

    def refresh(self) -> int:
        """Draw from evidence that is new; how many parts were drawn."""
        with self._lock:
            self._hear()
            oldest = _utc(self._now() - timedelta(days=self.settings.max_age_days))
            since = max(oldest, _utc(_time(self._until) - LATE)) if self._until else oldest
            events: list[tuple[str, Draw | Gold]] = []
            for row in self._parts.since(since):
                self._until = max(self._until, row.time)
                if row.result_id not in self._draws:
                    events += self._considered(row)
            self._notes([(name, asdict(found)) for name, found in events])
            for result_id in [r for r in self._waiting if self._draws[r].origin == "challenge"]:
                self._known(self._draws[result_id])
            for result_id in [r for r in self._waiting if self._draws[r].time < oldest]:
                self._waiting.discard(result_id)
            return sum(name == "draw" for name, _ in events)

    def waiting(self, reviewer: str) -> int:
        """How many parts wait for this person; gold is not counted."""
        with self._lock:
            return len(self._offers(reviewer))

    def disputed(self, reviewer: str) -> int:
        """How many wait for the decision of this lead."""
        with self._lock:
            return len(self._disputes(reviewer))

    def labels(self) -> list[Label]:
        """All, in the order in which they were given."""
        with self._lock:
            self._hear()
            return list(self._all)

    def draws(self) -> dict[str, Draw]:
        with self._lock:
            return dict(self._draws)

    def golden(self) -> dict[str, Gold]:
        with self._lock:
            return dict(self._gold)

    # Looking

    def next(self, reviewer: str, role: str) -> Look | None:
        """The next look of a person; the same one until it is answered. None: there is nothing."""
        with self._lock:
            self.refresh()
            if (own := self._unanswered(reviewer, adjudicate=False)) is not None:
                return own
            pools: dict[str, list[tuple[str, LookKind]]] = {"suspect": [], "calm": []}
            for offer in self._offers(reviewer):
                passed = self._draws[offer[0]].outcome == Outcome.PASS
                pools["calm" if passed else "suspect"].append(offer)
            number, suspects = len(self._looks), self._suspects()
            while pools["suspect"] or pools["calm"]:
                share = self.settings.gold_share
                name: str = chance.kind_of(self._seed, number, share, suspects)
                if name == "gold":
                    gold = self._gold_for(reviewer, number)
                    if gold is not None:
                        return self._look("gold", gold, reviewer, role)
                    split = chance.uniform(self._seed, "kind", number) < suspects
                    name = "suspect" if split else "calm"
                pool = pools[name] or pools["calm" if name == "suspect" else "suspect"]
                item = chance.pick(self._seed, number, pool)
                if self._there(item[0]):
                    return self._look(item[1], item[0], reviewer, role)
                pool.remove(item)
                self._note("gone", result_id=item[0])
            return None

    def next_dispute(self, reviewer: str, role: str) -> Look | None:
        """The next part that a lead has to decide, blind as the first look."""
        with self._lock:
            self.refresh()
            if (own := self._unanswered(reviewer, adjudicate=True)) is not None:
                return own
            for result_id in self._disputes(reviewer):
                if self._there(result_id):
                    return self._look("adjudicate", result_id, reviewer, role)
                self._note("gone", result_id=result_id)
            return None

    def look(self, look_id: str, reviewer: str) -> Look:
        """A look of this person. Somebody else's is as unknown as none."""
        with self._lock:
            found = self._looks.get(look_id)
            if found is None or found.reviewer != reviewer:
                raise ReviewError("no such look", action="ask for the next part")
            return found

    def unreadable(self, look: Look) -> None:
        """The part cannot be shown: nobody is asked of it any more."""
        with self._lock:
            self._note("gone", result_id=look.result_id)

    def seen(self, reviewer: str, result_id: str) -> None:
        """This person saw the verdict elsewhere: they are not asked blind any more."""
        with self._lock:
            if (reviewer, result_id) not in self._seen:
                self._note("seen", reviewer=reviewer, result_id=result_id)

    # Saying

    def answer(self, look: Look, given: Answer, digests: Mapping[str, str], cells: bool) -> Label:
        """Save the first answer of a look. The same key again gives what was saved.

        `cells`: after an NG the person is asked where the defect is.
        """
        with self._lock:
            if (saved := self._again(look, given.key)) is not None:
                return saved
            if self._answers(look):
                raise ReviewError("this part is answered", action="ask for the next part")
            asked = {"cells": "asked"} if given.label == "NG" and cells else {}
            label = self._label(look, given.label, given.key, digests)
            more = {**label.more, "sure": given.sure, "ms": given.ms, **asked}
            return self._say(look, replace(label, more=more))

    def paint(self, look: Look, given: Painted, digests: Mapping[str, str]) -> Label:
        """Save class and cells of the defect, or that they were skipped; only after an NG."""
        with self._lock:
            if (saved := self._again(look, given.key)) is not None:
                return saved
            answers = self._answers(look)
            if not answers or answers[-1].label != "NG":
                raise ReviewError("cells of a part that is not NG", expected="an NG before them")
            first = answers[0].more
            kept = {name: first[name] for name in ("sure", "ms") if name in first}
            label = self._label(look, "NG", given.key, digests)
            cells = {view: own for view, own in given.cells.items() if own} or None
            more = {**label.more, **kept, "cells": "given" if cells else "skipped"}
            said = replace(label, mark=given.mark, defect=given.defect, cells=cells, more=more)
            return self._say(look, said)

    def reveal(self, look: Look) -> None:
        """From now on this person knows. Before they have answered that is refused."""
        with self._lock:
            if not self._answers(look):
                raise ReviewError("the verdict is shown after the answer", expected="an answer")
            if look.id not in self._told:
                self._note("reveal", look=look.id)

    def change(self, look: Look, given: Answer, digests: Mapping[str, str]) -> Label:
        """Another answer after the reveal: a second record, informed."""
        with self._lock:
            if (saved := self._again(look, given.key)) is not None:
                return saved
            if look.id not in self._told:
                raise ReviewError("nothing was shown yet", expected="a change after the reveal")
            label = self._label(look, given.label, given.key, digests)
            return self._say(look, replace(label, more={**label.more, "sure": given.sure}))

    def make_gold(self, result_id: str, by: str) -> Gold:
        """Use a part to test reviewers: its truth must have been found blind."""
        with self._lock:
            self._hear()
            truth = words.truth(self._said.get(result_id, []))
            if truth is None:
                raise ReviewError(
                    "its truth is not known", which=result_id,
                    expected="two blind answers that agree, or a blind adjudication",
                )  # fmt: skip
            self._parts.keep(result_id, "held")
            drawn = self._draws.get(result_id)
            product = drawn.product if drawn is not None else ""
            self._note("gold", **asdict(Gold(result_id, product, truth, by)))
            return self._gold[result_id]

    def truth_of(self, look: Look) -> Literal["OK", "NG"] | None:
        """Of a look at gold; None of all others, and before the answer."""
        with self._lock:
            if look.kind != "gold" or not self._answers(look):
                return None
            return self._gold[look.result_id].truth

    def told(self, look: Look) -> bool:
        """Whether the verdict was shown."""
        with self._lock:
            return look.id in self._told

    def answers(self, look: Look) -> list[Label]:
        """What was said at a look."""
        with self._lock:
            return self._answers(look)

    # Inside

    def _considered(self, row: Row) -> list[tuple[str, Draw | Gold]]:
        """What is to be noted of a new part."""
        found: list[tuple[str, Draw | Gold]] = []
        known = self._masters.get(row.serial) or self.settings.challenge.get(row.serial)
        fresh = row.result_id not in self._gold and row.outcome != Outcome.ERROR
        if known is not None and fresh:
            found.append(("gold", Gold(row.result_id, row.product, known, f"serial {row.serial}")))
        drawn = chance.draw(row, self.settings, self._seed, self._pass_share, self._masters)
        if drawn is not None:
            found.append(("draw", drawn))
        return found

    def _there(self, result_id: str) -> bool:
        return result_id not in self._gone and self._parts.there(result_id)

    def _known(self, drawn: Draw) -> None:
        """The truth of a challenge part was known before it was inspected: nobody need be asked."""
        more = {
            "origin": drawn.origin, "chance": drawn.chance, "role": "list",
            "bundleDigest": drawn.bundle, "time": _utc(self._now()), "key": f"c-{drawn.result_id}",
        }  # fmt: skip
        truth = self._gold[drawn.result_id].truth
        label = Label(drawn.result_id, truth, "challenge list", True, adjudicates=True, more=more)
        self._labels.append(words.row(label))
        self._hear()

    def _offers(self, reviewer: str) -> list[tuple[str, LookKind]]:
        """Parts that are this person's to judge, and what the look would be; in a fixed order."""
        rested = _utc(self._now() - timedelta(minutes=self.settings.rest_minutes))
        taken = {
            look.result_id
            for name, look in self._open.items()
            if name != reviewer and self._leased(look)
        }
        found: list[tuple[str, LookKind]] = []
        for result_id in sorted(self._waiting - taken - {self._on_screen()}):
            said = self._said.get(result_id, ())
            if self._draws[result_id].time > rested or (reviewer, result_id) in self._seen:
                continue
            if all(label.reviewer != reviewer for label in said):
                found.append((result_id, "second" if said else "first"))
        return found

    def _disputes(self, reviewer: str) -> list[str]:
        """Parts that this lead may decide, the oldest first."""
        return [
            result_id
            for result_id, said in self._said.items()
            if words.contested(said)
            and not any(label.adjudicates or label.reviewer == reviewer for label in said)
            and (reviewer, result_id) not in self._seen
            and result_id in self._draws.keys() - self._gone
            and result_id != self._on_screen()
        ]

    def _gold_for(self, reviewer: str, number: int) -> str | None:
        since = _utc(self._now() - timedelta(days=self.settings.gold_again_days))
        lately = {
            look.result_id
            for look in self._looks.values()
            if look.reviewer == reviewer and look.time > since
        }
        fresh = [
            gold
            for gold in self._gold.values()
            if gold.result_id not in {*lately, self._on_screen()}
            and (reviewer, gold.result_id) not in self._seen
            and self._there(gold.result_id)
        ]
        if not fresh:
            return None
        wanted = "NG" if chance.uniform(self._seed, "truth", number) < 0.5 else "OK"
        own = [gold for gold in fresh if gold.truth == wanted] or fresh
        return chance.pick(self._seed, number, own, "gold").result_id

    def _suspects(self) -> float:
        found = {"suspect": [0, 0], "calm": [0, 0]}
        for result_id, said in self._said.items():
            drawn = self._draws.get(result_id)
            last = next((label for label in reversed(said) if label.blind), None)
            if drawn is None or drawn.origin == "challenge" or last is None:
                continue
            if last.label != "cannot_tell":
                name = "calm" if drawn.outcome == Outcome.PASS else "suspect"
                found[name][last.label == "OK"] += 1
        (bad, good), (rare, fine) = found["suspect"], found["calm"]
        return chance.suspect_share(
            self.settings.defect_share, (bad, good), (rare, fine), self.settings.gold_share
        )

    def _unanswered(self, reviewer: str, adjudicate: bool) -> Look | None:
        own = self._open.get(reviewer)
        if own is None or not self._leased(own) or (own.kind == "adjudicate") != adjudicate:
            return None
        if (reviewer, own.result_id) in self._seen or not self._there(own.result_id):
            return None
        return own

    def _leased(self, look: Look) -> bool:
        return _time(look.time) + LEASE > self._now()

    def _look(self, kind: LookKind, result_id: str, reviewer: str, role: str) -> Look:
        look_id = chance.token(self._seed, "look", len(self._looks))[:24]
        look = Look(look_id, kind, result_id, reviewer, role, _utc(self._now()))
        self._note("look", **asdict(look))
        return look

    def _answers(self, look: Look) -> list[Label]:
        said = self._said.get(look.result_id, [])
        return [label for label in said if label.more.get("look") == look.id]

    def _again(self, look: Look, key: str) -> Label | None:
        """What was saved with this key. A key of another look is refused."""
        self._hear()
        saved = self._keys.get(key)
        if saved is not None and saved.more.get("look") != look.id:
            raise ReviewError("the key of another answer", which="key", action="use a new one")
        return saved

    def _label(self, look: Look, said: words.Said, key: str, digests: Mapping[str, str]) -> Label:
        drawn = self._draws.get(look.result_id)
        informed = look.id in self._told or (look.reviewer, look.result_id) in self._seen
        more: dict[str, Any] = {
            "origin": drawn.origin if drawn is not None else "challenge",
            "chance": drawn.chance if drawn is not None else 1.0,
            "role": look.role,
            "second": look.kind == "second",
            "gold": look.kind == "gold",
            "viewDigest": dict(digests),
            "bundleDigest": drawn.bundle if drawn is not None else "",
            "look": look.id,
            "key": key,
            "time": _utc(self._now()),
        }
        adjudicates = look.kind == "adjudicate" and not informed
        return Label(
            look.result_id, said, look.reviewer, not informed, adjudicates=adjudicates, more=more
        )

    def _say(self, look: Look, label: Label) -> Label:
        self._labels.append(words.row(label))
        self._hear()
        try:
            self._parts.keep(look.result_id, "labelled")
        except StationError as error:  # the label is saved; the mark only helps
            log.warning("part %s: not marked as labelled: %s", look.result_id, error)
        return label

    def _note(self, event: str, **facts: Any) -> None:
        self._notes([(event, facts)])

    def _notes(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        """Add to the log, and to what is known, all of them or none."""
        if events:
            at = _utc(self._now())
            self._log.append(*({"event": name, "at": at, **facts} for name, facts in events))
        self._recall()

    def _recall(self) -> None:
        """Take in what was added to the log."""
        for row in self._log.news():
            try:
                self._take(row)
            except (KeyError, ValueError, StationError) as error:
                raise self._log.not_a_row(f"a whole {row.get('event')}", error) from error

    def _hear(self) -> None:
        """Take in what was added to the labels file, by us or by others."""
        for row in self._labels.news():
            try:
                label = record.read(Label, row)
            except ContractError as error:
                raise self._labels.not_a_row("a label", error) from error
            self._all.append(label)
            self._said[label.result_id].append(label)
            key = label.more.get("key")
            if isinstance(key, str):
                self._keys[key] = label
            own = self._open.get(label.reviewer)
            if own is not None and own.id == label.more.get("look"):
                del self._open[label.reviewer]
            self._close(label.result_id)

    def _close(self, result_id: str) -> None:
        """Take a part off the queue when enough people have judged it, or the lead has to."""
        drawn = self._draws.get(result_id)
        if drawn is None:
            return
        said = [label for label in self._said[result_id] if not label.more.get("gold")]
        people = {label.reviewer for label in said if label.blind}
        done = len(people) >= (2 if drawn.second else 1) or any(item.adjudicates for item in said)
        if done or words.contested(said):
            self._waiting.discard(result_id)

    def _take(self, row: Mapping[str, Any]) -> None:
        """One row of the log. Rows of a later version that we do not know are passed over."""
        event = row.get("event")
        if event == "seed":
            self._seed = str(row["seed"])
        elif event == "draw":
            drawn = _own(Draw, row)
            _time(drawn.time)
            self._draws[drawn.result_id] = drawn
            self._waiting.add(drawn.result_id)
            self._until = max(self._until, drawn.time)
        elif event == "look":
            look = _own(Look, row)
            _time(look.time)
            self._looks[look.id] = look
            self._open[look.reviewer] = look
        elif event == "reveal":
            self._told.add(str(row["look"]))
        elif event == "seen":
            self._seen.add((str(row["reviewer"]), str(row["result_id"])))
        elif event == "gone":
            self._gone.add(str(row["result_id"]))
            self._waiting.discard(str(row["result_id"]))
        elif event == "gold":
            gold = _own(Gold, row)
            self._gold[gold.result_id] = gold


def _own(cls: type[T], row: Mapping[str, Any]) -> T:
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    return record.read(cls, {name: row[name] for name in names})


def _only(folder: Path) -> int:
    """Hold the folder for this process. Raises ReviewError when another has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o640)
    except OSError as error:
        raise ReviewError("cannot be used", which=folder, got=error.strerror) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise ReviewError(
            "another page uses this folder", which=folder, action="stop the other one"
        ) from error
    return handle


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _utc(moment: datetime) -> str:
    text = moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


__all__ = ["LABELS", "QUEUE", "Gold", "Look", "Parts", "Queue"]
