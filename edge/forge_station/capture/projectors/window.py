"""A projector that is a monitor: patterns in a full-screen window, pixel for pixel.

SDL by pygame-ce (extra `projector`; why: see pyproject.toml). Works under X11, under Wayland, and
without a desktop on the console (SDL_VIDEODRIVER=kmsdrm). The image is handed over at a vertical
sync where the system has one; then the driver waits `settle_frames` refreshes, because projectors
buffer one to three images, and `settle_s`.
"""

from __future__ import annotations

import os
import time

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.projector import Prepared, ProjectorInfo, ProjectorSettings
from forge_station.errors import (
    ProjectorLostError,
    ProjectorNotFoundError,
    ProjectorSettingsError,
)

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
# A click on another monitor must not put the patterns away.
os.environ.setdefault("SDL_VIDEO_MINIMIZE_ON_FOCUS_LOSS", "0")
try:
    import pygame
except ImportError as missing:
    raise ProjectorNotFoundError(
        "the projector window needs pygame-ce",
        got=missing,
        action="install the extra: pip install forge-station[projector]",
    ) from missing

_USUAL_HZ = 60


class WindowProjector:
    """address: number of the monitor, from 0 (default). One window a process: SDL has no more."""

    def __init__(self, settings: ProjectorSettings) -> None:
        number = _monitor_number(settings.address)
        try:
            pygame.display.init()
            sizes = pygame.display.get_desktop_sizes()
        except pygame.error as error:
            raise ProjectorNotFoundError(
                "no screen can be opened",
                which="projector window",
                got=error,
                action="set DISPLAY, or SDL_VIDEODRIVER=kmsdrm on a station without a desktop",
            ) from error
        if number >= len(sizes):
            pygame.display.quit()
            listed = ", ".join(f"{k}: {w}x{h}" for k, (w, h) in enumerate(sizes))
            raise ProjectorNotFoundError(
                "no such monitor",
                which=f"projector window on monitor {number}",
                expected=f"one of {listed}",
                got=number,
                action="switch the projector on, or correct the address",
            )
        self._number, self._size = number, sizes[number]
        try:
            self._screen, self._synced = _full_screen(self._size, number)
            pygame.mouse.set_visible(False)
            pygame.display.set_caption("forge-station projector")
            pygame.display.set_allow_screensaver(False)
        except pygame.error as error:
            pygame.display.quit()
            raise ProjectorSettingsError(
                "the monitor refuses a full-screen window", which=number, got=error
            ) from error
        hertz = pygame.display.get_desktop_refresh_rates()[number] or _USUAL_HZ
        self._frame_s = 1.0 / hertz
        self._settle_s = settings.settle_frames * self._frame_s + settings.settle_s
        self._prepared = Prepared(f"monitor {number}", self._size)
        self._dark()

    def describe(self) -> ProjectorInfo:
        synced = "vertical sync" if self._synced else "no vertical sync"
        model = (
            f"monitor {self._number}, {pygame.display.get_driver()}, "
            f"{1 / self._frame_s:.0f} Hz, {synced}"
        )
        return ProjectorInfo("window", model, self._size, "host", self._frame_s)

    def prepare(self, images: NDArray[np.uint8]) -> None:
        """Raises ProjectorLostError where the monitor has gone or changed its resolution."""
        self._prepared.take(images)
        self._refuse_changes()

    def show(self, index: int) -> None:
        image = self._prepared.image(index)
        self._refuse_changes()
        try:
            self._screen.blit(_surface(image), (0, 0))
            pygame.display.flip()
        except pygame.error as error:
            raise ProjectorLostError(
                "the projector window failed", which=self._number, got=error
            ) from error
        time.sleep(self._settle_s)

    def close(self) -> None:
        if self._prepared.closed:
            return
        self._prepared.close()
        self._dark()
        pygame.display.quit()

    def _dark(self) -> None:
        self._screen.fill((0, 0, 0))
        pygame.display.flip()

    def _refuse_changes(self) -> None:
        """The window must be where it was: answered events also keep the desktop from greying it.

        Raises ProjectorLostError.
        """
        closed = any(event.type == pygame.QUIT for event in pygame.event.get())
        sizes = pygame.display.get_desktop_sizes()
        now = sizes[self._number] if self._number < len(sizes) else None
        if closed or now != self._size:
            got = "its window was closed" if closed else f"{now or 'no such monitor'}"
            raise ProjectorLostError(
                "the projector's monitor changed",
                which=f"monitor {self._number}",
                expected=f"{self._size[0]}x{self._size[1]}",
                got=got,
                action="check its cable and power; open the head again",
            )


def open_window(settings: ProjectorSettings) -> WindowProjector:
    """Entry point of the driver `window`. Raises ProjectorNotFoundError."""
    return WindowProjector(settings)


def _monitor_number(address: str) -> int:
    if not (address or "0").isdecimal():
        raise ProjectorSettingsError(
            "address of the projector window", expected="number of a monitor, from 0", got=address
        )
    return int(address or 0)


def _full_screen(size: tuple[int, int], number: int) -> tuple[pygame.Surface, bool]:
    """A window over the whole monitor, and whether it waits for the vertical sync."""
    # SCALED only brings the sync: the size is the monitor's own.
    flags = pygame.FULLSCREEN | pygame.SCALED
    try:
        return pygame.display.set_mode(size, flags, display=number, vsync=1), True
    except pygame.error:
        return pygame.display.set_mode(size, pygame.FULLSCREEN, display=number), False


def _surface(image: NDArray[np.uint8]) -> pygame.Surface:
    height, width = image.shape
    grey = pygame.image.frombuffer(image.tobytes(), (width, height), "P")
    grey.set_palette([(level, level, level) for level in range(256)])
    return grey
