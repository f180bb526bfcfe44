"""The scanner that the station file names, and what there is to trigger it with.

Simulated trays, recordings or real heads; it knows no model, no broker and no loop.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forge_station.capture import depth_head, head
from forge_station.capture.base import Scanner, ScanSource, Trigger
from forge_station.capture.camera import Camera
from forge_station.capture.replay import ReplayScanner
from forge_station.capture.supervisor import Change, SupervisedCamera
from forge_station.config import DepthScanner, HeadScanner, SimScanner, StationConfig
from forge_station.config import ReplayScanner as ReplayConfig
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.spec import Product
from forge_station.errors import CaptureError

log = logging.getLogger(__name__)


@dataclass
class SimulatedLine:
    """Trays by serial number, and the scanner whose field is set to each tray's product."""

    config: StationConfig
    settings: SimScanner
    trays: dict[str, Any] = field(default_factory=dict)
    scanners: dict[str, Any] = field(default_factory=dict)
    camera: Camera | None = None
    """One whose input line can be the trigger."""

    def warm_up(self) -> None:
        """Compile the simulator's loops (seconds, on the first run only) before a part waits."""
        from forge_station.sim import fasteners, scanner

        part = fasteners.build(CATALOGUE[0])
        pose = scanner.rig(0.3, image_size=(64, 64))[0]
        scanner.simulate([part], pose, np.random.default_rng(0), exposures=(1.0,))

    def triggers(self, count: int, first: int = 1) -> Iterator[Trigger]:
        """One trigger a part; products in turn, right and wrong trays at random."""
        products = self.config.line.products
        for number in range(first, first + count):
            product = products[(number - 1) % len(products)]
            serial = f"{self.config.station}-{number:06d}"
            self.trays[serial] = self._tray(product, number)
            yield Trigger(serial, product.part_number)
            # The truth is kept for the summary; the shapes of a long run would fill the memory.
            self.trays[serial] = replace(self.trays[serial], meshes=())

    def scanner_of(self, trigger: Trigger) -> Scanner:
        """The simulated head, set to the product's field; made once a product."""
        from forge_station.capture.sim import SimulatedScanner
        from forge_station.sim import scanner

        product = self.config.line.product(trigger.part_number)
        if product.part_number not in self.scanners:
            width, depth, height = product.field_mm or self._field_of(product)
            scale = scanner.scale_for(
                width, depth, height, self.settings.poses, self.settings.image_size
            )
            self.scanners[product.part_number] = SimulatedScanner(
                self._meshes,
                scanner.rig(scale, self.settings.poses, self.settings.image_size),
                seed=self.settings.seed,
                exposures=self.settings.exposures,
            )
        found: Scanner = self.scanners[product.part_number]
        return found

    def _meshes(self, trigger: Trigger) -> Any:
        """What lies on the tray. A serial that `triggers` did not give out has a tray as well."""
        tray = self.trays.get(trigger.serial)
        if tray is None:
            product = self.config.line.product(trigger.part_number)
            tray = self._tray(product, zlib.crc32(trigger.serial.encode()))
        return tray.meshes

    def _tray(self, product: Product, number: int) -> Any:
        from forge_station.sim import trays

        rng = np.random.default_rng([self.settings.seed, number])
        wrong = bool(rng.random() < self.settings.wrong_share)
        return trays.make(product, rng, wrong=wrong)

    def _field_of(self, product: Product) -> tuple[float, float, float]:
        """The field that ten sample trays of the product need."""
        from forge_station.sim import trays

        rng = np.random.default_rng(self.settings.seed)
        boxes = [trays.field_mm(trays.make(product, rng, wrong=False).meshes) for _ in range(10)]
        width, depth, height = np.max(boxes, axis=0).tolist()
        return width, depth, height


@dataclass
class Recorded:
    """A folder of recorded pattern stacks in place of the simulated line."""

    config: StationConfig
    settings: ReplayConfig
    trays: dict[str, Any] = field(default_factory=dict)
    scanner: ReplayScanner | None = None
    camera: Camera | None = None

    def warm_up(self) -> None:
        """Nothing to prepare: recordings are read when their trigger comes."""

    def triggers(self, count: int, first: int = 1) -> Iterator[Trigger]:
        return _counted(self.config, count, first)

    def scanner_of(self, trigger: Trigger) -> Scanner:
        if self.scanner is None:
            self.scanner = ReplayScanner(self.settings.folder, self.settings.mode)
        return self.scanner


@dataclass
class Heads:
    """Real heads. Their cameras open in the background; `on_camera` is told how each is."""

    config: StationConfig
    settings: HeadScanner | DepthScanner
    on_camera: Callable[[Change], None] | None = None
    trays: dict[str, Any] = field(default_factory=dict)
    scanner: head.HeadScanner | depth_head.DepthScanner | None = None

    @property
    def camera(self) -> Camera:
        """That of the first head."""
        return self._opened().heads[0].camera

    def warm_up(self) -> None:
        """Give the cameras the time to open. One that does not is no reason not to start."""
        for one in self._opened().heads:
            if isinstance(one.camera, SupervisedCamera):
                try:
                    one.camera.wait_open(one.camera.settings.open_timeout_s)
                except CaptureError as error:
                    log.warning("head %s: its camera is not there yet: %s", one.name, error)

    def triggers(self, count: int, first: int = 1) -> Iterator[Trigger]:
        return _counted(self.config, count, first)

    def scanner_of(self, trigger: Trigger) -> Scanner | ScanSource:
        return self._opened()

    def _opened(self) -> head.HeadScanner | depth_head.DepthScanner:
        if self.scanner is None:
            age_s, told = self.settings.trigger_age_s, self.on_camera
            if isinstance(self.settings, DepthScanner):
                self.scanner = depth_head.open_depth_heads(
                    self.settings.heads, trigger_age_s=age_s, on_change=told
                )
            else:
                self.scanner = head.open_heads(
                    self.settings.heads, trigger_age_s=age_s, on_change=told
                )
        return self.scanner


def _counted(config: StationConfig, count: int, first: int) -> Iterator[Trigger]:
    """Triggers without a line: serial numbers in order, products in turn."""
    products = config.line.products
    for number in range(first, first + count):
        product = products[(number - 1) % len(products)]
        yield Trigger(f"{config.station}-{number:06d}", product.part_number)


def open_line(
    config: StationConfig, on_camera: Callable[[Change], None] | None = None
) -> SimulatedLine | Recorded | Heads:
    """The source of trays that the station file names. Raises CaptureError without the extra.

    on_camera: told of each change of a real camera, in the thread that watches it.
    """
    if isinstance(config.scanner, (HeadScanner, DepthScanner)):
        return Heads(config, config.scanner, on_camera)
    if isinstance(config.scanner, SimScanner):
        import forge_station.capture.sim  # noqa: F401  says which extra is missing

        return SimulatedLine(config, config.scanner)
    return Recorded(config, config.scanner)
