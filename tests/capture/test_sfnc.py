"""SFNC logic against a node map of devices old and new."""

from __future__ import annotations

import pytest

from forge_station.capture.camera import CameraSettings
from forge_station.capture.cameras.sfnc import FrameCounter, Sfnc, genapi_text
from forge_station.errors import CameraSettingsError
from tests.capture.fake_nodes import FakeNodes

TRIGGERS = {
    "TriggerSelector": ("AcquisitionStart", "FrameStart"),
    "TriggerMode": ("Off", "On"),
    "TriggerSource": ("Line0", "Line1", "Software"),
    "TriggerSoftware": 0,
}
SELECTED = {"TriggerMode": "TriggerSelector", "TriggerSource": "TriggerSelector"}


def test_settings_are_made_in_the_order_in_which_they_depend_on_each_other() -> None:
    nodes = FakeNodes(
        {
            "AcquisitionMode": ("SingleFrame", "Continuous"), "Width": 10,
            "LineSelector": ("A", "B"), "PixelFormat": ("Mono8", "Mono12p"),
            "ExposureAuto": ("Continuous", "Off"),
            "ExposureTime": 1.0, "GainAuto": ("Continuous", "Off"), "Gain": 0.0,
            "AcquisitionFrameRateEnable": False, "AcquisitionFrameRate": 1.0,
        }
    )  # fmt: skip
    settings = CameraSettings(
        "x", "y", exposure_us=500, gain=3, pixel_format="Mono12p", fps=20,
        options={"Width": 640, "LineSelector": "B", "buffers": 3},
    )  # fmt: skip
    Sfnc(nodes, "cam").apply(settings)
    assert nodes.written == [
        ("AcquisitionMode", "Continuous"), ("Width", 640), ("LineSelector", "B"),
        ("PixelFormat", "Mono12p"), ("ExposureAuto", "Off"), ("ExposureTime", 500),
        ("GainAuto", "Off"), ("Gain", 3), ("AcquisitionFrameRateEnable", True),
        ("AcquisitionFrameRate", 20),
    ]  # fmt: skip


def test_older_names_are_used_where_the_device_has_no_other() -> None:
    nodes = FakeNodes({"ExposureTimeAbs": 1.0, "AcquisitionFrameRateAbs": 1.0, "GainAbs": 0.0})
    Sfnc(nodes, "cam").apply(CameraSettings("x", "y", exposure_us=9, gain=1, fps=2))
    assert [nodes.get(name) for name in ("ExposureTimeAbs", "GainAbs")] == [9, 1]


def test_what_is_not_asked_for_is_left_alone() -> None:
    nodes = FakeNodes({"ExposureTime": 1.0, "Gain": 2.0, "ExposureAuto": ("Continuous", "Off")})
    Sfnc(nodes, "cam").apply(CameraSettings("x", "y"))
    assert nodes.written == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gain": 1}, r"refuses Gain = 1 \(cam\)"),
        ({"exposure_us": 1e9}, r"refuses ExposureTime = .*within 1\.\.1e\+06"),
        ({"pixel_format": "RGB8"}, r"refuses PixelFormat = RGB8 .*expected one of Mono8, Mono12"),
        ({"options": {"TriggerDelai": 5}}, r"refuses TriggerDelai = 5"),
    ],
)
def test_a_refusal_says_what_and_what_the_device_would_take(
    settings: dict[str, object], message: str
) -> None:
    nodes = FakeNodes(
        {"ExposureTime": 1.0, "PixelFormat": ("Mono8", "Mono12")},
        limits={"ExposureTime": (1, 1e6)},
    )
    with pytest.raises(CameraSettingsError, match=message):
        Sfnc(nodes, "cam").apply(CameraSettings("x", "y", **settings))  # type: ignore[arg-type]


def test_triggers_are_what_the_device_and_the_line_allow() -> None:
    nodes = FakeNodes(TRIGGERS, SELECTED)
    assert Sfnc(nodes, "c").triggers("Line1") == ("free", "software", "hardware")
    assert Sfnc(nodes, "c").triggers("Line7") == ("free", "software")
    assert Sfnc(FakeNodes({}), "c").triggers("Line1") == ("free",)


def test_one_trigger_waits_and_every_other_is_off() -> None:
    nodes = FakeNodes(TRIGGERS, SELECTED)
    nodes.set("TriggerSelector", "AcquisitionStart")
    nodes.set("TriggerMode", "On")  # as a colleague left it
    sfnc = Sfnc(nodes, "cam")
    sfnc.set_trigger("hardware", "Line1")

    def modes() -> dict[str, object]:
        found = {}
        for selector in ("AcquisitionStart", "FrameStart"):
            nodes.set("TriggerSelector", selector)
            found[selector] = nodes.get("TriggerMode")
        return found

    assert modes() == {"AcquisitionStart": "Off", "FrameStart": "On"}
    assert nodes.get("TriggerSource") == "Line1"
    sfnc.set_trigger("software", "Line1")
    assert nodes.get("TriggerSource") == "Software"
    nodes.set("TriggerSelector", "AcquisitionStart")
    sfnc.fire()
    assert nodes.get("TriggerSelector") == "FrameStart" and nodes.executed == ["TriggerSoftware"]
    sfnc.set_trigger("free", "Line1")
    assert set(modes().values()) == {"Off"}


def test_a_trigger_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(CameraSettingsError, match=r"no trigger .*got software"):
        Sfnc(FakeNodes({}), "cam").set_trigger("software", "Line1")
    Sfnc(FakeNodes({}), "cam").set_trigger("free", "Line1")
    with pytest.raises(CameraSettingsError, match=r"Line7.*expected one of Line0, Line1"):
        Sfnc(FakeNodes(TRIGGERS, SELECTED), "cam").set_trigger("hardware", "Line7")


def test_a_trigger_waits_until_the_device_is_ready() -> None:
    status = {"AcquisitionStatusSelector": ("AcquisitionActive", "FrameTriggerWait")}
    busy = FakeNodes({**status, "AcquisitionStatus": False})
    assert Sfnc(busy, "cam").wait_ready(0.01) is False
    assert busy.get("AcquisitionStatusSelector") == "FrameTriggerWait"
    assert Sfnc(FakeNodes({**status, "AcquisitionStatus": True}), "cam").wait_ready(0.01)
    assert Sfnc(FakeNodes({}), "cam").wait_ready(0.0)


def test_chunks_are_those_that_the_device_has() -> None:
    nodes = FakeNodes(
        {
            "ChunkModeActive": False, "ChunkEnable": False,
            "ChunkSelector": ("Image", "Framecounter", "Timestamp"),
        },
        {"ChunkEnable": "ChunkSelector"},
    )  # fmt: skip
    assert Sfnc(nodes, "cam").enable_chunks() == ("frame_id", "timestamp")
    assert nodes.get("ChunkModeActive") is True
    foreign = FakeNodes({"ChunkModeActive": False, "ChunkSelector": ("Ball",), "ChunkEnable": True})
    assert Sfnc(foreign, "cam").enable_chunks() == ()
    assert foreign.get("ChunkModeActive") is False
    assert Sfnc(FakeNodes({}), "cam").enable_chunks() == ()


@pytest.mark.parametrize("prefix", ["Ptp", "GevIEEE1588"])
def test_a_device_that_follows_a_master_has_the_time_of_the_line(prefix: str) -> None:
    names = {
        f"{prefix}DataSetLatch": 0,
        f"{prefix}Status": ("Listening", "Slave", "Master"),
        f"{prefix}OffsetFromMaster": -120,
    }
    nodes = FakeNodes(names)
    sfnc = Sfnc(nodes, "cam")
    assert sfnc.clock() == "device" and sfnc.ptp_status() == "Listening"
    nodes.set(f"{prefix}Status", "Slave")
    assert sfnc.clock() == "ptp" and sfnc.ptp_offset_ns() == -120
    assert f"{prefix}DataSetLatch" in nodes.executed
    assert Sfnc(FakeNodes({}), "cam").clock() == "device"


def test_sixteen_bit_frame_ids_turn_and_wide_ones_do_not() -> None:
    counter = FrameCounter()
    ids = [65533, 65534, 65535, 1, 2, 4, 65535, 1]
    assert [counter.number(k) for k in ids] == [
        65533, 65534, 65535, 65536, 65537, 65539, 131070, 131071,
    ]  # fmt: skip
    wide = FrameCounter()
    assert [wide.number(k) for k in (65534, 65535, 65536, 70000)] == [65534, 65535, 65536, 70000]
    repeated = FrameCounter()
    assert [repeated.number(k) for k in (7, 7, 6)] == [7, 7, 6]


def test_errors_of_genapi_are_told_without_its_source_files() -> None:
    error = RuntimeError(
        "Feature 'A' : cannot convert value 'x', the value is invalid. : InvalidArgumentException "
        "thrown in node 'A' while calling 'A.FromString()' (file 'Enumeration.cpp', line 132)"
    )
    assert genapi_text(error) == "Feature 'A' : cannot convert value 'x', the value is invalid"
    assert genapi_text(RuntimeError("")) == "RuntimeError('')"
