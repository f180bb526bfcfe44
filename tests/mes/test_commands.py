"""Commands: who may, once only, and what is told. Each refusal leaves the station as it was."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_station.contract.error import ContractError
from forge_station.errors import LinkError
from forge_station.mes import command, schema
from forge_station.mes.command import CommandConfig, CommandKey, Refused
from forge_station.mes.command_store import Answer, CommandStore
from forge_station.mes.commands import TOLD_AT_ONCE, CommandServer
from forge_station.mes.link import Inbound, Outgoing
from tests.mes import signing_rig as rig

NOW = 1_796_000_000.0


class Station:
    """A station without one: what was done, said and stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.epoch = rig.EPOCH
        self.now = NOW
        self.done: list[tuple[str, Mapping[str, Any]]] = []
        self.sent: list[Outgoing] = []
        self.stored: list[dict[str, Any]] = []
        self.alarms: list[tuple[str, str]] = []
        self.filters: list[str] = []
        self.store: CommandStore | None = None

    def subscribe(self, topic_filter: str, handler: Any) -> None:
        self.filters.append(topic_filter)

    def send(self, message: Outgoing) -> None:
        self.sent.append(message)

    def put(self, stream: str, topic: str, body: bytes, id: str | None = None) -> int:
        assert (stream, topic) == ("audit", f"{rig.CONFIG.root}/insp/v1/evt/audit")
        schema.require(json.loads(body), stamped=False)
        self.stored.append(json.loads(body))
        return len(self.stored)

    def server(self, config: CommandConfig | None = None) -> CommandServer:
        def refuse(_: Mapping[str, Any]) -> None:
            raise ContractError("no such product", expected="bolt", got="nut")

        def fail(_: Mapping[str, Any]) -> None:
            raise LinkError("the link is gone")

        def ping(args: Mapping[str, Any]) -> Mapping[str, Any]:
            self.done.append(("ping", args))
            return {"before": {"x": 1}, "after": {"x": 2}}

        handlers = {
            "ping": ping,
            "setThreshold": lambda args: self.done.append(("setThreshold", args)),
            "selectRecipe": refuse,
            "rebirth": fail,
            "stop": lambda args: 1 / 0,
        }
        self.store = CommandStore(self.folder / "commands.db")
        return CommandServer(
            rig.CONFIG,
            config or rig.settings(),
            handlers,  # type: ignore[arg-type]
            self,
            self,
            self.store,
            alarm=lambda code, text: self.alarms.append((code, text)),
            clock=lambda: self.now,
        )

    def give(self, *messages: Inbound, config: CommandConfig | None = None) -> None:
        """Hand the messages to a server and wait until it has dealt with them."""
        with self.server(config) as server:
            for item in messages:
                server.take(item)
        assert self.store is not None
        self.store.close()

    @property
    def replies(self) -> list[dict[str, Any]]:
        found = [json.loads(item.body) for item in self.sent]
        for item in found:
            schema.require(item)
        return found


@pytest.fixture
def station(tmp_path: Path) -> Station:
    return Station(tmp_path)


def test_command_is_carried_out_answered_and_audited(station: Station) -> None:
    asked = rig.message(now=NOW)
    station.give(rig.inbound(asked, correlation=b"c1"))
    assert station.filters == [f"{rig.CONFIG.root}/insp/v1/in/cmd/+"]
    assert station.done == [("ping", {})]
    (reply,) = station.replies
    assert (reply["cmdId"], reply["name"], reply["status"]) == (asked["cmdId"], "ping", "SUCCEEDED")
    (sent,) = station.sent
    assert sent.topic == f"{rig.CONFIG.root}/insp/v1/rsp/{asked['cmdId']}"
    assert (sent.correlation, sent.expiry_s, sent.qos, sent.retain) == (b"c1", 3600, 1, False)
    (audit,) = station.stored
    expected = {
        "action": "ping", "outcome": "SUCCEEDED", "cmdId": asked["cmdId"], "keyName": "mes-1",
        "keyId": rig.public(rig.KEY).id, "issuer": "test", "before": {"x": 1}, "after": {"x": 2},
    }  # fmt: skip
    assert {key: audit[key] for key in expected} == expected


def altered(**changes: Any) -> dict[str, Any]:
    return {**rig.message(now=NOW), **changes}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in rig.message(now=NOW).items() if key != name}


FAR = {"root": "enterprise/site/area/line/other", "epoch": rig.EPOCH}
OLD = {"root": rig.CONFIG.root, "epoch": "ffffffff"}
REFUSED = {
    "unsigned": (rig.inbound(without("sig")), "MALFORMED"),
    "altered": (rig.inbound(altered(issuer="boss")), "BAD_SIGNATURE"),
    "altered args": (rig.inbound(altered(args={"a": 1})), "BAD_SIGNATURE"),
    "stranger's key": (rig.inbound(rig.message(now=NOW, key=rig.STRANGER)), "UNKNOWN_KEY"),
    "stranger's key under a known name": (
        rig.inbound(
            {
                **(forged := rig.message(now=NOW, key=rig.STRANGER)),
                "sig": {**forged["sig"], "keyId": rig.public(rig.KEY).id},
            }
        ),
        "BAD_SIGNATURE",
    ),
    "expired": (rig.inbound(rig.message(now=NOW, age_s=31)), "EXPIRED"),
    "from the future": (rig.inbound(rig.message(now=NOW, age_s=-60)), "NOT_YET_VALID"),
    "valid for a day": (rig.inbound(rig.message(now=NOW, lifetime_s=86400)), "MALFORMED"),
    "ends before it begins": (rig.inbound(rig.message(now=NOW, lifetime_s=-1)), "MALFORMED"),
    "retained": (rig.inbound(rig.message(now=NOW), retained=True), "RETAINED"),
    "another station's": (rig.inbound(rig.message(now=NOW, target=FAR)), "WRONG_TARGET"),
    "of an older epoch": (rig.inbound(rig.message(now=NOW, target=OLD)), "WRONG_TARGET"),
    "on another topic": (rig.inbound(rig.message(now=NOW), "stop"), "WRONG_NAME"),
    "1 MB": (rig.inbound(b"{" + b" " * 1_000_000 + b"}"), "TOO_LARGE"),
    "1 MB, signed": (
        rig.inbound(rig.message(args={"x": "y" * 1_000_000}, now=NOW)),
        "TOO_LARGE",
    ),
    "no JSON": (rig.inbound(b"ping"), "MALFORMED"),
    "nested without end": (rig.inbound(b"[" * 9000), "MALFORMED"),
    "half a character in a name": (
        rig.inbound(json.dumps(altered(**{"\ud800": 1})).encode()),
        "MALFORMED",
    ),
    "not UTF-8": (rig.inbound(b"\xff\xfe{}"), "MALFORMED"),
    "NaN": (rig.inbound(b'{"counter":NaN}'), "MALFORMED"),
    "a member twice": (
        rig.inbound(json.dumps(rig.message(now=NOW)).encode()[:-1] + b',"name":"stop"}'),
        "MALFORMED",
    ),
    "counter too large to be exact": (
        rig.inbound(altered(counter=2**53)),
        "MALFORMED",
    ),
    "unknown command": (rig.inbound(rig.message("fly", now=NOW), "fly"), "NOT_SUPPORTED"),
    "not handled here": (rig.inbound(rig.message("capture", now=NOW), "capture"), "NOT_SUPPORTED"),
    "role": (rig.inbound(rig.message("deploy", {"jobId": "j"}, now=NOW), "deploy"), "FORBIDDEN"),
    "arguments": (
        rig.inbound(rig.message("setThreshold", {"name": "x"}, now=NOW), "setThreshold"),
        "BAD_ARGS",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_audited_and_nothing_is_done(station: Station, case: str) -> None:
    given, code = REFUSED[case]
    station.give(given)
    assert station.done == []
    (audit,) = station.stored
    assert audit["code"] == code
    assert audit["outcome"] == ("EXPIRED" if code == "EXPIRED" else "REJECTED")
    assert [reply["code"] for reply in station.replies] in ([code], [])
    authentic = code not in ("TOO_LARGE", "RETAINED", "MALFORMED", "UNKNOWN_KEY", "BAD_SIGNATURE")
    assert ("keyId" in audit) == (authentic or case in ("valid for a day", "ends before it begins"))
    assert bool(station.alarms) == (
        code in ("TOO_LARGE", "RETAINED", "UNKNOWN_KEY", "BAD_SIGNATURE")
    )


def test_lone_surrogate_has_no_canonical_form() -> None:
    with pytest.raises(Refused, match="MALFORMED"):
        command.canonical({"issuer": "\ud800"})


def test_same_command_again_is_not_done_again(station: Station) -> None:
    asked = rig.inbound(rig.message(now=NOW))
    station.give(asked, asked)
    station.now += 3600  # expired by now, yet its sender learns how it went
    station.give(asked)
    assert len(station.done) == 1
    assert [item["status"] for item in station.replies] == ["SUCCEEDED", "DUPLICATE", "DUPLICATE"]
    assert station.replies[2]["result"]["status"] == "SUCCEEDED"
    assert [item["outcome"] for item in station.stored] == ["SUCCEEDED", "DUPLICATE", "DUPLICATE"]


def test_older_counter_of_a_key_is_a_replay(station: Station) -> None:
    first, second = rig.message(now=NOW), rig.message(now=NOW)
    station.give(rig.inbound(second), rig.inbound(first))
    assert [item["status"] for item in station.replies] == ["SUCCEEDED", "REJECTED"]
    assert station.replies[1]["code"] == "REPLAYED"
    station.give(rig.inbound(first))  # nor after a restart
    assert station.replies[2]["code"] == "REPLAYED"
    assert len(station.done) == 1


def test_refused_command_does_not_use_up_its_id_or_counter(station: Station) -> None:
    asked = rig.message(now=NOW)
    station.give(rig.inbound(asked, retained=True), rig.inbound(asked, "stop"), rig.inbound(asked))
    assert [item["outcome"] for item in station.stored] == ["REJECTED", "REJECTED", "SUCCEEDED"]


@pytest.mark.parametrize(
    ("name", "args", "status", "code"),
    [
        ("selectRecipe", {"productId": "nut"}, "REJECTED", "BAD_ARGS"),
        ("rebirth", {}, "FAILED", "LINK_FAILED"),
        ("stop", {}, "FAILED", "STATION_ERROR"),
    ],
)
def test_handler_that_cannot_is_answered_with_why(
    station: Station, name: str, args: dict[str, Any], status: str, code: str
) -> None:
    station.give(rig.inbound(rig.message(name, args, now=NOW), name))
    (reply,) = station.replies
    assert (reply["status"], reply["code"]) == (status, code)
    assert station.stored[0]["code"] == code


def test_reply_goes_to_a_topic_of_choice_among_the_reply_topics_only(station: Station) -> None:
    prefix = f"{rig.CONFIG.root}/insp/v1"
    wishes = [
        f"{prefix}/rsp/mes-1", f"{prefix}/evt/verdict", f"{prefix}/rsp/a/b", f"{prefix}/rsp/#",
    ]  # fmt: skip
    for wish in wishes:
        station.give(rig.inbound(rig.message(now=NOW), response_topic=wish))
    forged = rig.message(now=NOW, key=rig.STRANGER)
    station.give(rig.inbound(forged, response_topic=wishes[0]))
    chosen, *rest = [item.topic for item in station.sent]
    assert chosen == wishes[0]
    assert rest == [f"{prefix}/rsp/{item['cmdId']}" for item in station.replies[1:]]


def test_without_a_key_nothing_is_subscribed_to(station: Station) -> None:
    with station.server(CommandConfig()) as server:
        assert server.capabilities == ()
        assert station.filters == []


def test_capabilities_name_what_has_a_handler(station: Station) -> None:
    assert "command:ping" in station.server().capabilities
    assert "command:deploy" not in station.server().capabilities


def test_flood_is_counted_and_neither_answered_nor_stored_one_by_one(station: Station) -> None:
    forged = [rig.inbound(rig.message(now=NOW, key=rig.STRANGER)) for _ in range(60)]
    station.give(*forged)
    assert TOLD_AT_ONCE <= len(station.stored) <= TOLD_AT_ONCE + 5
    assert len(station.alarms) == len(station.stored)


def test_messages_beyond_what_may_wait_are_dropped_and_told_of(station: Station) -> None:
    hold = threading.Event()
    server = station.server()
    server._handlers["ping"] = lambda _: hold.wait(10) and None  # type: ignore[func-returns-value]
    with server:
        for _ in range(110):
            server.take(rig.inbound(rig.message(now=NOW)))
        hold.set()
    assert sum(item.get("suppressed", 0) for item in station.stored) in range(9, 12)
    assert station.store is not None
    station.store.close()


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_refused_without_an_accident(body: bytes) -> None:
    with pytest.raises(Refused):
        command.read(body, rig.settings().keys)
    command.told_id(body)


def test_number_notation_and_member_order_do_not_matter() -> None:
    asked = rig.message("setThreshold", {"name": "defect_fail", "value": 0.5}, now=NOW)
    text = json.dumps(dict(reversed(asked.items())), indent=2).replace("0.5", "5.0E-1")
    found = command.read(text.encode(), rig.settings().keys)
    assert found.args == {"name": "defect_fail", "value": 0.5}


@pytest.mark.parametrize(
    "bad",
    [
        lambda: CommandKey("mes", rig.public(rig.KEY), ()),
        lambda: CommandKey("", rig.public(rig.KEY), ("operator",)),
        lambda: CommandConfig((*rig.settings().keys, *rig.settings("operator").keys)),
        lambda: CommandConfig(thresholds={"defect_fail": (0.6, 0.4)}),
    ],
)
def test_bad_settings_are_refused(bad: Any) -> None:
    with pytest.raises(ContractError):
        bad()


class TestMemory:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[CommandStore]:
        with CommandStore(tmp_path / "commands.db") as opened:
            yield opened

    def test_ids_and_counters_survive(self, store: CommandStore) -> None:
        store.begin("a", "k", 7, "ping")
        store.finish("a", Answer("SUCCEEDED", None, "done", {"x": [1]}))
        store.close()
        with CommandStore(store.path) as again:
            assert again.answer("a") == Answer("SUCCEEDED", None, "done", {"x": [1]})
            assert (again.counter("k"), again.counter("other")) == (7, 0)
            assert again.renewed_at is None

    def test_command_begun_by_a_station_that_ended_is_not_begun_again(
        self, store: CommandStore
    ) -> None:
        store.begin("a", "k", 7, "ping")
        with CommandStore(store.path) as again:
            found = again.answer("a")
            assert found is not None
            assert (found.status, found.code) == ("FAILED", "INTERRUPTED")

    def test_memory_is_bounded(self, store: CommandStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forge_station.mes.command_store.KEPT_COMMANDS", 5)
        for number in range(9):
            store.begin(f"c{number}", "k", number + 1, "ping")
            time.sleep(0.001)
        known = [number for number in range(9) if store.answer(f"c{number}")]
        assert known == [4, 5, 6, 7, 8]

    def test_old_commands_are_forgotten_their_counters_never(
        self, store: CommandStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.begin("old", "k", 9, "ping")
        monkeypatch.setattr("forge_station.mes.command_store.KEPT_S", 0.01)
        time.sleep(0.02)
        store.begin("new", "other", 1, "ping")
        assert store.answer("old") is None
        assert store.counter("k") == 9

    def test_damaged_memory_refuses_what_was_issued_before_it_was_renewed(
        self, station: Station
    ) -> None:
        path = station.folder / "commands.db"
        path.write_bytes(b"no database at all" * 500)
        now = station.now = time.time()
        station.give(
            rig.inbound(rig.message(now=now, age_s=1)), rig.inbound(rig.message(now=now + 1))
        )
        assert [item["outcome"] for item in station.stored] == ["REJECTED", "SUCCEEDED"]
        assert station.stored[0]["code"] == "REPLAYED"
        assert list(station.folder.glob("commands.db.damaged-*"))
