"""Drivers are found by name, and what is open is closed when the rest of an opening fails."""

from __future__ import annotations

import pytest

from forge_station.capture import camera, depth_head, head, projector
from forge_station.capture.camera import CameraSettings
from forge_station.capture.depth_head import DepthHeadSettings
from forge_station.capture.drivers import Registry, closed_on_error
from forge_station.errors import CameraNotFoundError, ProjectorNotFoundError


class Device:
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    ("registry", "error"),
    [(camera.REGISTRY, CameraNotFoundError), (projector.REGISTRY, ProjectorNotFoundError)],
)
def test_an_unknown_driver_is_told_with_those_that_there_are(
    registry: Registry, error: type[Exception]
) -> None:
    assert registry.find("sim").name == "sim"
    with pytest.raises(error, match=rf"no such {registry.kind} driver \(head a: none\).*sim"):
        registry.find("none", "head a: ")


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_what_is_open_is_closed_by_any_failure(failure: type[BaseException]) -> None:
    one, other = Device(), Device()
    with closed_on_error(one):
        pass
    assert one.closed == 0
    with pytest.raises(failure), closed_on_error(one, other):
        raise failure
    assert (one.closed, other.closed) == (1, 1)


def test_heads_that_are_open_are_closed_when_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Device] = []

    def first_only(*_: object, **__: object) -> Device:
        if opened:
            raise KeyboardInterrupt
        opened.append(Device())
        return opened[-1]

    monkeypatch.setattr(depth_head, "SupervisedCamera", first_only)
    settings = [DepthHeadSettings(name, CameraSettings("gentl3d")) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        depth_head.open_depth_heads(settings)
    assert [device.closed for device in opened] == [1]

    opened.clear()
    monkeypatch.setattr(head, "_open_head", first_only)
    with pytest.raises(KeyboardInterrupt):
        head.open_heads([None, None])  # type: ignore[list-item]
    assert [device.closed for device in opened] == [1]
