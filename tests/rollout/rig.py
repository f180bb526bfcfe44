"""A plant: a broker and stations whose store, deployments, commands and messages are real.

Only the models are not: each answers as the version of its bundle says (`1.2.0-FAIL`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_station import control
from forge_station.bundles.deploy import Deployer, Seen
from forge_station.bundles.settings import ReleaseConfig
from forge_station.bundles.store import BundleStore
from forge_station.config import EvidenceConfig, SimScanner, StationConfig
from forge_station.contract.spec import LineSpec, Product
from forge_station.control import Control
from forge_station.mes.command import CommandConfig, CommandKey
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.topics import MqttConfig
from forge_station.pipeline import Job
from forge_station.vlm.bundle_files import read_manifest
from tests.bundles.deploy_rig import ANYBODY, ScriptInspector, ScriptModel, verdict
from tests.mes import signing_rig

LINE = LineSpec("l1", (Product("NUT", "single", ("workpiece",), {"hex_nut M8": 1}),))
LIMITS = ReleaseConfig(
    unsigned=True, golden_required=False, shadow_parts=3, shadow_disagree=1.0, trial_parts=3
)
QUICK = Timing(reconnect_s=(0.05, 0.2), settle_s=0.0)


class Model(ScriptModel):
    provider = "script"


def opened(folder: Path) -> Any:
    return ScriptInspector(Model(read_manifest(folder)))


@dataclass
class Duck:
    """What `control` needs of a station."""

    config: StationConfig
    main: Any
    outbox: Outbox
    publisher: Publisher
    bundle: Path
    stopped: str | None = None
    selected: str = ""
    judging: str = ""
    in_work: Any = field(default_factory=threading.Lock)

    @property
    def inspector(self) -> Any:
        return self.main

    @property
    def state(self) -> Mapping[str, Any]:
        return {"state": "RUN", "text": ""}

    def tell(self, why: str | None) -> None: ...


class RigStation:
    """A context manager. `flowing` says whether parts come."""

    def __init__(self, folder: Path, name: str, port: int, limits: ReleaseConfig = LIMITS) -> None:
        self.name, self.folder = name, folder / name
        self.config = StationConfig(
            line=LINE,
            bundle=self.folder / "store",
            scanner=SimScanner("sim"),
            outbox=self.folder / "outbox.sqlite",
            evidence=EvidenceConfig(self.folder / "evidence"),
            mqtt=MqttConfig(port=port, line="l1", station=name, keepalive_s=5),
            release=limits,
            commands=CommandConfig(
                (CommandKey("eng", signing_rig.public(signing_rig.KEY), ("release",)),)
            ),
        )
        self.flowing = threading.Event()
        self.flowing.set()
        self._stop = threading.Event()
        self._stack = ExitStack()
        self.deployer: Deployer | None = None
        self.takes_bundles = True

    def install(self, bundle: str) -> RigStation:
        """A bundle that has proved itself, before the station starts."""
        store = BundleStore.create(self.config.bundle, "l1")
        store.activate(store.install(Path(bundle), ANYBODY).name, ANYBODY, good=True)
        return self

    @property
    def release(self) -> int:
        active = BundleStore(self.config.bundle).active
        assert active is not None
        return active.manifest.release_counter

    @property
    def jobs(self) -> list[str]:
        assert self.deployer is not None
        return [job.id for job in self.deployer.jobs.all()]

    def __enter__(self) -> RigStation:
        active = BundleStore(self.config.bundle).active
        assert active is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        enter = self._stack.enter_context
        outbox = enter(Outbox(self.config.outbox, ballast_bytes=0))
        publisher = Publisher(outbox, self.config.mqtt, timing=QUICK)
        self.duck = Duck(self.config, opened(active.folder), outbox, publisher, active.folder)
        enter(publisher)
        deployer = control.deployer_of(self.duck)  # type: ignore[arg-type]
        assert deployer is not None
        self.deployer = enter(deployer)
        given = self.deployer if self.takes_bundles else None
        enter(control.served(Control(self.duck, deployer=given)))  # type: ignore[arg-type]
        self._stop.clear()
        thread = threading.Thread(target=self._line)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._stop.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _line(self) -> None:
        """Parts, one after the other."""
        assert self.deployer is not None
        while not self._stop.is_set():
            if self.flowing.is_set():
                with self.duck.in_work:
                    found = verdict(self.duck.main.says)
                    job = Job(result_id="r", serial="s", product=None)
                    self.deployer.part(Seen(job, ["stack"], {}, found))
            time.sleep(0.01)


@dataclass
class Plant:
    """Stations at one broker, and the engineer's folder."""

    folder: Path
    port: int
    stack: ExitStack
    bundle: Callable[..., str]
    stations: dict[str, RigStation] = field(default_factory=dict)

    def add(
        self, name: str, *, release: int = 1, running: bool = True, **limits: Any
    ) -> RigStation:
        station = RigStation(self.folder, name, self.port, replace(LIMITS, **limits))
        station.install(self.bundle(self.folder, release))
        self.stations[name] = station
        if running:
            self.stack.enter_context(station)
        return station

    def plan(self, bundle: str, **changes: Any) -> Path:
        """A plan for all stations: s1 first, then the others."""
        first, *_ = self.stations
        plan = {
            "name": "test",
            "bundle": bundle,
            "url": str(self.folder / "{file}"),
            "mqtt": {"port": self.port, "line": "l1", "keepalive_s": 5},
            "stations": [{"name": name} for name in self.stations],
            "groups": [{"name": "canary", "stations": [first]}, {"name": "all", "share": 1}],
            **changes,
        }
        path = self.folder / "plan.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in plan.items() if v is not None}))
        return path

    @property
    def releases(self) -> dict[str, int]:
        return {name: station.release for name, station in self.stations.items()}


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail("it did not happen in time")
        time.sleep(0.02)
