"""Level 2 and the consumer library over a real broker: what is missing is sent again."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from forge_station.config import load_station
from forge_station.errors import LinkError, OutboxError
from forge_station.mes import publication
from forge_station.mes.consumer import Consumer, Delivery, Figures
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.topics import MqttConfig, topic_of
from tests.mes.rig import MOSQUITTO, Mosquitto, wait_for

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
QUICK = Timing(settle_s=0.0, resend_s=0.0, reconnect_s=(0.1, 0.3), no_consumer_s=(0.1, 0.3))


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path / "outbox.db", ballast_bytes=0) as opened:
        yield opened


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path) as running:
        yield running


def config_of(broker: Mosquitto, receipts: str | None = "mes") -> MqttConfig:
    return MqttConfig(port=broker.port, receipts=receipts, keepalive_s=5)


def put(outbox: Outbox, config: MqttConfig, count: int) -> None:
    for _ in range(count):
        outbox.put("verdict", topic_of(config, "verdict"), b'{"schema":"verdict/1.0"}')


def take(consumer: Consumer, count: int, timeout_s: float = 10.0) -> list[Delivery]:
    found: list[Delivery] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline:
        delivery = consumer.next(deadline - time.monotonic())
        if delivery is not None:
            found.append(delivery)
    return found


def numbers(deliveries: list[Delivery]) -> list[int]:
    return [item.number for item in deliveries]


def drained(consumer: Consumer, outbox: Outbox) -> bool:
    """All is confirmed. Whoever uses a consumer goes on asking it: it learns in `next`."""
    return wait_for(lambda: consumer.next(0.02) is None and not outbox.pending, 30.0)


def test_nothing_is_sent_to_a_consumer_that_is_away_and_all_once_it_is_there(
    broker: Mosquitto, outbox: Outbox, tmp_path: Path
) -> None:
    config = config_of(broker)
    put(outbox, config, 30)
    with Publisher(outbox, config, timing=QUICK) as publisher:
        assert wait_for(lambda: publisher.stats().connected)
        time.sleep(0.3)
        assert publisher.stats().published == 0
        assert publisher.stats().waiting_for_consumer == ("verdict",)
        with Consumer(config, "mes", tmp_path / "mes.json") as consumer:
            assert numbers(take(consumer, 30)) == list(range(1, 31))
            assert consumer.next(0.01) is None  # the last one is stored, too
            assert drained(consumer, outbox)
            (heard,) = publisher.consumers()
            assert (heard.id, heard.alive, heard.positions["verdict"].upto) == ("mes", True, 30)
            assert consumer.figures().missing == 0


def test_what_the_consumer_did_not_store_is_not_delivered(
    broker: Mosquitto, outbox: Outbox, tmp_path: Path
) -> None:
    config = config_of(broker)
    put(outbox, config, 1)
    with Publisher(outbox, config, timing=QUICK) as publisher:
        consumer = Consumer(config, "mes", tmp_path / "mes.json")
        consumer.start()
        assert len(take(consumer, 1)) == 1
        assert wait_for(  # it was told where it began
            lambda: consumer.next(0.02) is None and consumer._watermark.receipt()
        )
        put(outbox, config, 9)
        assert len(take(consumer, 4)) == 4
        consumer.close(stored=False)  # it died while it stored the fifth
        assert wait_for(lambda: outbox.pending == 6, 30.0)
        assert wait_for(lambda: publisher.stats().connected)
        with Consumer(config, "mes", tmp_path / "mes.json") as consumer:
            # the broker may have kept one of them for it, which then comes before those asked for
            assert sorted(numbers(take(consumer, 6))) == list(range(5, 11))
            assert consumer.next(0.01) is None
            assert drained(consumer, outbox)


@pytest.mark.parametrize("receipts", ["mes", None])
def test_consumer_that_comes_back_with_a_new_session_gets_exactly_what_it_misses(
    broker: Mosquitto, outbox: Outbox, tmp_path: Path, receipts: str | None
) -> None:
    config = config_of(broker, receipts)
    watermark = tmp_path / "mes.json"
    with Publisher(outbox, config, timing=QUICK) as publisher:
        with Consumer(config, "mes", watermark) as consumer:
            put(outbox, config, 5)
            assert numbers(take(consumer, 5)) == [1, 2, 3, 4, 5]
            assert consumer.next(0.01) is None  # the fifth is stored
            assert wait_for(  # it was told where it began
                lambda: consumer.next(0.02) is None and consumer._watermark.receipt()
            )
        broker.close()
        broker.start()  # the session of the consumer is gone
        assert wait_for(lambda: publisher.stats().connected)
        if receipts is None:
            from forge_station.mes.listen import Listener

            with Listener(config, statuses=False):  # somebody else takes 6 to 8
                put(outbox, config, 3)
                assert publisher.drain(30.0)
        else:
            put(outbox, config, 3)
        with Consumer(config, "mes", watermark) as consumer:
            put(outbox, config, 2)
            assert sorted(numbers(take(consumer, 5))) == [6, 7, 8, 9, 10]
            assert consumer.next(0.3) is None
            assert drained(consumer, outbox)


def test_numbers_that_are_gone_are_told_and_hold_nothing_up(
    broker: Mosquitto, outbox: Outbox, tmp_path: Path
) -> None:
    config = config_of(broker)
    topic = topic_of(config, "verdict")
    outbox.put("verdict", topic, b"{}")
    outbox.put("verdict", topic, b"not json")
    outbox.put("verdict", topic, b"{}")
    with (
        Consumer(config, "mes", tmp_path / "mes.json") as consumer,
        Publisher(outbox, config, timing=QUICK),
    ):
        assert len(take(consumer, 3)) == 3  # 1, 3 and the alarm
        assert consumer.next(0.01) is None
        assert wait_for(lambda: consumer.next(0.02) is None and consumer.figures().gone == 1)
        assert drained(consumer, outbox)
        assert consumer.figures().missing == 0


def test_replay_sends_delivered_rows_again_to_whoever_listens(
    broker: Mosquitto, outbox: Outbox
) -> None:
    from forge_station.mes.listen import Listener

    config = config_of(broker, None)
    with (
        Listener(config, statuses=False, repeats=True) as listener,
        Publisher(outbox, config, timing=QUICK) as publisher,
    ):
        put(outbox, config, 6)
        assert publisher.drain(30.0)
        bodies = [item.body for item in listener.messages(0.3)]
        assert wait_for(lambda: not outbox._writer.marks)
        replayed = publisher.replay(2, 4, outbox.epoch)
        assert (replayed.rows, replayed.missing) == (3, ())
        assert [item.body for item in listener.messages(0.5)] == bodies[1:4]
        for wrong in ((0, 1, outbox.epoch), (3, 2, outbox.epoch), (1, 7, outbox.epoch)):
            with pytest.raises(OutboxError, match="cannot be replayed"):
                publisher.replay(*wrong)
        with pytest.raises(OutboxError, match="of epoch"):
            publisher.replay(1, 2, "00000000")


def test_new_epoch_begins_from_its_first_number(
    broker: Mosquitto, outbox: Outbox, tmp_path: Path
) -> None:
    config = config_of(broker)
    watermark = tmp_path / "mes.json"
    put(outbox, config, 4)
    with Publisher(outbox, config, timing=QUICK), Consumer(config, "mes", watermark) as consumer:
        assert len(take(consumer, 4)) == 4
        assert wait_for(lambda: consumer.next(0.02) is None and not outbox.pending)
    with Outbox(tmp_path / "other.db", ballast_bytes=0) as other:
        put(other, config, 3)
        with (
            Publisher(other, config, timing=QUICK) as publisher,
            Consumer(config, "mes", watermark) as consumer,
        ):
            assert numbers(take(consumer, 3)) == [1, 2, 3]
            assert consumer.next(0.01) is None
            assert publisher.drain(8.0)


def test_watermark_file_is_for_one_station_and_one_process(
    broker: Mosquitto, tmp_path: Path
) -> None:
    config = config_of(broker)
    watermark = tmp_path / "mes.json"
    with Consumer(config, "mes", watermark), pytest.raises(LinkError, match="another process"):
        Consumer(config, "mes2", watermark).start()
    watermark.write_text(json.dumps({"source": "a/b/c/d/e", "streams": {}}))
    with pytest.raises(LinkError, match="belongs to another station"):
        Consumer(config, "mes", watermark).start()
    watermark.write_text(json.dumps({"source": config.root, "streams": {"verdict": 7}}))
    with pytest.raises(LinkError, match="damaged"):
        Consumer(config, "mes", watermark).start()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"5", b"[" * 60_000, b'{"schema": "gone/1.0"}', b'{"schema": "gone/7"}',
        *(
            b'{"streamSeq": %s, "epoch": "e", "stream": "verdict", "id": "x"}' % number
            for number in (b"1e999", b"-5", b"0", b"true", b'"7"', b"1.5", b"null")
        ),
    ],
)  # fmt: skip
def test_foreign_messages_end_no_consumer(tmp_path: Path, body: bytes) -> None:
    consumer = Consumer(MqttConfig(), "mes", tmp_path / "mes.json")
    assert consumer._read("t", body) is None
    assert consumer.figures() == Figures(0, 0, 0, 0)


def test_a_very_long_range_that_is_gone_is_taken_at_once(tmp_path: Path) -> None:
    consumer = Consumer(MqttConfig(), "mes", tmp_path / "mes.json")
    gone = publication.gone_message(
        MqttConfig(), "mes", "verdict", "0123abcd", ranges=[(5, 10**15)], begin=3
    )
    for _ in range(2):
        assert consumer._read(gone.topic, gone.body) is None
    assert consumer.figures() == Figures(0, 0, 10**15 - 4, 2)


@pytest.mark.parametrize("upto", ["1e400", '"x"', "[]"])
def test_a_damaged_watermark_is_named(tmp_path: Path, upto: str) -> None:
    watermark = tmp_path / "mes.json"
    facts = json.dumps({"source": MqttConfig().root, "streams": {"verdict": {"e": "POSITION"}}})
    position = f'{{"upto": {upto}, "beyond": []}}'
    watermark.write_text(facts.replace('"POSITION"', position))
    with pytest.raises(LinkError, match="damaged"):
        Consumer(MqttConfig(), "mes", watermark).start()


def test_a_watermark_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LinkError, match="cannot be written"):
        Consumer(MqttConfig(), "mes", tmp_path / "file" / "mes.json").start()


def test_example_stores_every_event_once_and_goes_on_where_it_was(
    broker: Mosquitto, outbox: Outbox, tmp_path: Path
) -> None:
    repository = Path(__file__).parents[2]
    text = (repository / "station_config/demo/station.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    folder = repository / "station_config/demo"
    content.update({key: str(folder / content[key]) for key in ("line", "bundle")})
    content["mqtt"].update({"port": broker.port, "receipts": "mes"})
    content["trusted_keys"] = []
    content["broker"] = "external"
    file = tmp_path / "station.yaml"
    file.write_text(yaml.safe_dump(content))
    config = load_station(file).mqtt
    put(outbox, config, 5)
    program = repository / "examples/mes/python/consumer_of_record.py"
    command = [sys.executable, program, file, tmp_path / "events.db", "--count"]
    paths = {**os.environ, "PYTHONPATH": str(repository / "edge")}
    with Publisher(outbox, config, timing=QUICK) as publisher:
        for count in ("3", "2"):
            done = subprocess.run([*command, count], env=paths, timeout=60, check=True,
                                  capture_output=True, text=True)  # fmt: skip
            assert len(done.stdout.splitlines()) == int(count)
        assert publisher.drain(10.0)
    db = sqlite3.connect(tmp_path / "events.db")
    assert db.execute("select number from events order by number").fetchall() == [
        (number,) for number in range(1, 6)
    ]
    db.close()
