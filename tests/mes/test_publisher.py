"""The publisher against a broker without a network: every answer a broker can give."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forge_station.contract.error import ContractError
from forge_station.mes import delivery
from forge_station.mes.link import Acknowledged, Down, Outgoing
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.topics import MqttConfig, topic_of
from tests.mes.rig import ScriptedBroker, wait_for

CONFIG = MqttConfig(station="st1")
QUICK = Timing(
    settle_s=0.2,
    reconnect_s=(0.02, 0.05),
    no_consumer_s=(0.05, 0.1),
    taken_over_s=60.0,
)


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path / "outbox.db", ballast_bytes=0) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _short_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "GOODBYE_S", 0.05)  # many of these brokers never answer


def put(outbox: Outbox, count: int, stream: str = "verdict") -> list[int]:
    body = b'{"n":%d}'
    return [outbox.put(stream, topic_of(CONFIG, stream), body % n) for n in range(count)]


def publisher(outbox: Outbox, broker: ScriptedBroker, timing: Timing = QUICK) -> Publisher:
    return Publisher(outbox, CONFIG, timing=timing, connect=broker.connect)


def seqs(messages: list[Outgoing], stream: str = "verdict") -> list[int]:
    topic = topic_of(CONFIG, stream)
    return [json.loads(item.body)["seq"] for item in messages if item.topic == topic]


def test_rows_are_sent_in_order_and_confirmed(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    sent = put(outbox, 50)
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
        late = put(outbox, 10)
        assert running.drain(5.0)
        assert running.stats().acked == running.stats().published == 60
    assert seqs(broker.events()) == sent + late
    assert (outbox.counts().pending, outbox.counts().acked) == (0, 60)


def test_message_carries_its_identity_in_body_and_properties(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    outbox.put("verdict", topic_of(CONFIG, "verdict"), b'{"a":1}', id="r1")
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
    (message,) = broker.events()
    assert (message.qos, message.retain) == (1, False)
    assert json.loads(message.body) == {
        "id": "r1",
        "stream": "verdict",
        "epoch": outbox.epoch,
        "seq": 1,
        "streamSeq": 1,
        "bootId": outbox.boot_id,
        "a": 1,
    }
    assert dict(message.properties)["id"] == "r1"
    assert dict(message.properties)["seq"] == "1"


def test_alarms_go_first(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    put(outbox, 100)
    put(outbox, 2, "alarm")
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
    assert [item.topic.rsplit("/", 1)[1] for item in broker.events()][:3] == [
        "alarm",
        "alarm",
        "verdict",
    ]


@pytest.mark.parametrize("window", [1, 5, 20])
def test_no_more_is_on_its_way_than_the_broker_takes(outbox: Outbox, window: int) -> None:
    broker = ScriptedBroker(lambda _: None)
    broker.window = window
    put(outbox, 60)
    with publisher(outbox, broker) as running:
        assert wait_for(lambda: running.stats().in_flight == window)
        session = broker.sessions[0]
        answered = 0
        while not running.drain(0.0):
            time.sleep(0.001)
            while answered < session.packet:
                answered += 1
                session.acknowledge(answered, 0)
        assert broker.most_unanswered == window


def test_status_is_retained_and_comes_before_rows(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    put(outbox, 1)
    running = publisher(outbox, broker)
    running.set_status("state", {"state": "OPERATIONAL", "mode": "READY"})
    with running:
        assert running.drain(5.0)
    statuses = [item for item in broker.got if "/sts/" in item.topic]
    assert all(item.retain and item.qos == 1 for item in statuses)
    assert [item.topic.rsplit("/", 1)[1] for item in broker.got] == [
        "birth",
        "conn",
        "state",
        "verdict",
        "conn",
    ]
    states = [json.loads(item.body)["state"] for item in statuses if item.topic.endswith("conn")]
    assert states == ["ONLINE", "OFFLINE"]
    birth = json.loads(statuses[0].body)
    assert birth["nextSeq"] == 2
    assert birth["epoch"] == outbox.epoch


def test_will_says_that_the_connection_broke(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    with publisher(outbox, broker):
        assert wait_for(lambda: broker.wills)
    (will,) = broker.wills
    assert will.retain
    assert will.topic == topic_of(CONFIG, "conn")
    assert json.loads(will.body)["state"] == "CONNECTIONBROKEN"
    assert (broker.closed, broker.dropped) == (1, 0)


def test_status_that_breaks_its_schema_is_refused_at_once(outbox: Outbox) -> None:
    with pytest.raises(ContractError, match="RUNNING"):
        publisher(outbox, ScriptedBroker()).set_status("state", {"state": "RUNNING"})


def test_no_broker_at_boot_delays_nothing_but_delivery(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    broker.refusals = 10**6
    with publisher(outbox, broker) as running:
        began = time.perf_counter()
        put(outbox, 20)
        assert time.perf_counter() - began < 2.0
        assert wait_for(lambda: running.stats().last_error)
        assert not running.drain(0.1)
        assert running._mailbox.waiting() <= 1  # a long outage uses no memory
        broker.refusals = 0
        assert running.drain(5.0)
    assert len(seqs(broker.events())) == 20


def test_nobody_subscribed_keeps_the_rows_and_asks_with_one_at_a_time(outbox: Outbox) -> None:
    broker = ScriptedBroker(lambda message: 0x10 if "/evt/" in message.topic else 0)
    put(outbox, 30)
    with publisher(outbox, broker) as running:
        assert wait_for(lambda: len(broker.events()) >= 23)
        assert outbox.counts().pending == 30
        assert running.stats().waiting_for_consumer == ("verdict",)
        assert len(broker.events()) < 30  # the first window, then single rows
        broker.answer = lambda _: 0
        assert running.drain(5.0)
        assert running.stats().waiting_for_consumer == ()
    ids = [json.loads(item.body)["id"] for item in broker.events()]
    assert len(set(ids)) == 30
    assert outbox.counts().dead == 0


def test_stream_without_subscribers_does_not_stop_the_others(outbox: Outbox) -> None:
    alarms = topic_of(CONFIG, "alarm")
    broker = ScriptedBroker(lambda message: 0x10 if message.topic == alarms else 0)
    put(outbox, 3, "alarm")
    put(outbox, 40)
    with publisher(outbox, broker) as running:
        assert wait_for(lambda: outbox.pending == 3)
        assert running.stats().acked == 40


def test_quota_of_the_broker_is_waited_for(outbox: Outbox) -> None:
    broker = ScriptedBroker(lambda message: 0x97 if "/evt/" in message.topic else 0)
    put(outbox, 3)
    with publisher(outbox, broker) as running:
        assert wait_for(lambda: running.stats().held >= 3)
        broker.answer = lambda _: 0
        assert running.drain(5.0)
    assert outbox.counts().dead == 0


@pytest.mark.parametrize("reason", [0x80, 0x83, 0x87, 0x90, 0x99])
def test_refused_row_becomes_a_dead_letter_with_one_alarm_and_the_next_flow(
    outbox: Outbox, reason: int
) -> None:
    broker = ScriptedBroker(
        lambda message: reason if json.loads(message.body).get("n") in (1, 2) else 0
    )
    put(outbox, 5)
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
        assert wait_for(lambda: len(outbox.dead_letters()) == 2)
        assert running.stats().dead == 2
    assert {letter.reason for letter in outbox.dead_letters()} == {reason}
    alarms = [json.loads(item.body) for item in broker.events() if item.topic.endswith("alarm")]
    assert [alarm["code"] for alarm in alarms] == ["DEAD_LETTER"]
    assert alarms[0]["params"]["reason"] == reason
    assert len(seqs(broker.events())) == 5


def test_refused_alarm_raises_no_alarm(outbox: Outbox) -> None:
    broker = ScriptedBroker(lambda message: 0x87 if "/evt/" in message.topic else 0)
    put(outbox, 1, "alarm")
    put(outbox, 1)
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
        assert wait_for(lambda: len(outbox.dead_letters()) == 3)
    assert len(broker.events()) == 3


def test_dead_letters_put_back_are_sent_by_the_running_publisher(outbox: Outbox) -> None:
    broker = ScriptedBroker(lambda message: 0x87 if "/evt/verdict" in message.topic else 0)
    sent = put(outbox, 3)
    with publisher(outbox, broker) as running:
        assert wait_for(lambda: len(outbox.dead_letters()) == 3)
        broker.answer = lambda _: 0
        outbox.requeue_dead()
        assert running.drain(5.0)
    assert len(set(seqs(broker.events()))) == 2 * len(sent)  # new numbers ...
    assert (
        len({json.loads(item.body)["id"] for item in broker.events() if b'"n"' in item.body}) == 3
    )
    assert outbox.counts().dead == 0


def test_body_that_is_no_json_is_a_dead_letter(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    outbox.put("verdict", topic_of(CONFIG, "verdict"), b"\xff\xfe")
    put(outbox, 1)
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
        assert wait_for(lambda: [item.reason for item in outbox.dead_letters()] == [0x99])
    assert seqs(broker.events()) == [2]


def test_row_larger_than_the_broker_takes_is_not_sent(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    broker.maximum_packet_bytes = 2000
    outbox.put("verdict", topic_of(CONFIG, "verdict"), b'{"x":"%s"}' % (b"y" * 2000))
    put(outbox, 1)
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
        assert wait_for(lambda: [item.reason for item in outbox.dead_letters()] == [0x95])
    assert seqs(broker.events()) == [2]


def test_rows_on_their_way_at_a_broken_connection_are_sent_again_unchanged(outbox: Outbox) -> None:
    broker = ScriptedBroker(lambda message: None if "/evt/" in message.topic else 0)
    sent = put(outbox, 5)
    with publisher(outbox, broker) as running:
        assert wait_for(lambda: len(broker.events()) == 5)
        broker.sessions[0].acknowledge(3, 0)  # birth and conn were 1 and 2
        broker.answer = lambda _: 0
        broker.sessions[0].emit(Down(None, "cable"))
        assert running.drain(5.0)
    assert seqs(broker.events()) == sent + sent[1:]
    bodies: dict[int, set[bytes]] = {}
    for item in broker.events():
        bodies.setdefault(json.loads(item.body)["seq"], set()).add(item.body)
    assert {len(item) for item in bodies.values()} == {1}
    assert broker.dropped == 1


def test_answer_of_an_ended_connection_confirms_nothing(outbox: Outbox) -> None:
    broker = ScriptedBroker(lambda message: None if "/evt/" in message.topic else 0)
    put(outbox, 1)
    with publisher(outbox, broker) as running:
        assert wait_for(lambda: len(broker.events()) == 1)
        broker.sessions[0].emit(Down(None, "cable"))
        assert wait_for(lambda: len(broker.events()) == 2)
        broker.sessions[0].emit(Acknowledged(3, 0, "late"))
        time.sleep(0.1)
        assert outbox.pending == 1
        assert running.stats().in_flight == 1


def test_broker_without_memory_gets_what_it_had_confirmed_last_again(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    sent = put(outbox, 5)
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
        assert wait_for(lambda: not outbox._writer.marks)
        broker.session_present = False
        ended = time.monotonic()
        broker.sessions[0].emit(Down(None, "broker died"))
        assert wait_for(lambda: len(broker.events()) == 10)
        assert time.monotonic() - ended > QUICK.settle_s  # consumers come back first
        assert running.drain(5.0)
    assert seqs(broker.events()) == sent + sent


def test_consumers_have_their_time_although_the_connection_ends_meanwhile(outbox: Outbox) -> None:
    timing = replace(QUICK, settle_s=0.6)
    broker = ScriptedBroker()
    put(outbox, 5)
    with publisher(outbox, broker, timing) as running:
        assert running.drain(5.0)
        broker.session_present = False
        began = time.monotonic()
        broker.sessions[0].emit(Down(None, "broker died"))
        assert wait_for(lambda: running.stats().connects == 2)
        broker.session_present = True  # the one that was made just now
        broker.sessions[1].emit(Down(None, "cable"))
        assert wait_for(lambda: len(broker.events()) == 10)
        assert len(broker.sessions) == 3
        assert time.monotonic() - began > timing.settle_s


def test_station_that_starts_again_trusts_no_session_of_the_process_before(tmp_path: Path) -> None:
    broker = ScriptedBroker()
    for connects in (1, 2):
        with Outbox(tmp_path / "outbox.db", ballast_bytes=0) as outbox:
            put(outbox, 1)
            began = time.monotonic()
            with publisher(outbox, broker) as running:
                assert running.drain(5.0)
        assert (time.monotonic() - began > QUICK.settle_s) or connects == 1
    assert seqs(broker.events()) == [1, 2]


def test_broker_that_keeps_losing_its_memory_gets_no_older_rows_each_time(outbox: Outbox) -> None:
    timing = replace(QUICK, settle_s=0.0, resend_s=0.2)
    broker = ScriptedBroker()
    put(outbox, 3)
    with publisher(outbox, broker, timing) as running:
        assert running.drain(5.0)
        assert wait_for(lambda: not outbox._writer.marks)
        time.sleep(0.5)
        last = put(outbox, 2)
        assert running.drain(5.0)
        assert wait_for(lambda: not outbox._writer.marks)
        broker.session_present = False
        broker.answer = lambda message: None if "/evt/" in message.topic else 0
        for connects in (1, 2):
            broker.sessions[-1].emit(Down(None, "broker died"))
            assert wait_for(lambda: len(broker.events()) == 5 + 2 * connects)  # noqa: B023
        broker.answer = lambda _: 0
        broker.sessions[-1].emit(Down(None, "broker died"))
        assert running.drain(5.0)
    assert seqs(broker.events())[5:] == last * 3


def test_broker_with_memory_gets_nothing_twice(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    sent = put(outbox, 5)
    with publisher(outbox, broker) as running:
        assert running.drain(5.0)
        broker.sessions[0].emit(Down(None, "cable"))
        assert wait_for(lambda: len(broker.sessions) == 2)
        sent += put(outbox, 1)
        assert running.drain(5.0)
    assert seqs(broker.events()) == sent


def test_silent_broker_is_left_after_a_while(outbox: Outbox) -> None:
    broker = ScriptedBroker(lambda message: None if "/evt/" in message.topic else 0)
    put(outbox, 2)
    timing = Timing(stall_s=0.3, reconnect_s=(0.02, 0.05))
    with publisher(outbox, broker, timing) as running:
        assert wait_for(lambda: len(broker.sessions) >= 2, 8.0)
        broker.answer = lambda _: 0
        assert running.drain(5.0)


def test_dead_network_thread_is_noticed(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    with publisher(outbox, broker) as running:
        assert wait_for(lambda: broker.sessions and running.stats().connected)
        broker.sessions[0].alive = False
        assert wait_for(lambda: len(broker.sessions) == 2)


def test_message_that_ends_every_connection_is_found_and_buried(outbox: Outbox) -> None:
    broker = ScriptedBroker(lambda message: "drop" if json.loads(message.body).get("n") == 7 else 0)
    sent = put(outbox, 15)
    with publisher(outbox, broker) as running:
        assert running.drain(10.0)
        assert wait_for(lambda: [item.seq for item in outbox.dead_letters()] == [sent[7]])
    assert set(seqs(broker.events())) == set(sent)
    assert outbox.counts().acked == 14 + 1  # and the alarm


def test_station_with_our_id_is_not_fought(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    with publisher(outbox, broker):
        assert wait_for(lambda: broker.sessions)
        broker.sessions[0].emit(Down(0x8E, "Session taken over"))
        time.sleep(0.5)
        assert len(broker.sessions) == 1
        put(outbox, 1)


def test_close_is_quick_while_there_is_no_broker(outbox: Outbox) -> None:
    broker = ScriptedBroker()
    broker.refusals = 10**6
    timing = Timing(reconnect_s=(30.0, 30.0))
    running = publisher(outbox, broker, timing)
    running.start()
    running.start()
    assert wait_for(lambda: running.stats().last_error)
    began = time.monotonic()
    running.close()
    running.close()
    assert time.monotonic() - began < 1.0
