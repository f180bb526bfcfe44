"""Bundles and recordings that several tests of the command line inspect with.

What needs torch or the simulator is imported where it is used: other tests here run without.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from forge_station.capture import replay
from forge_station.contract.catalogue import CATALOGUE, by_id
from forge_station.vlm.bundle_files import read_manifest
from tests.station import certificates


@pytest.fixture(scope="session")
def bundle(tmp_path_factory) -> Path:
    """A random model that knows the words of the catalogue and accepts every size."""
    from export.bundle import Release, write_bundle
    from tests import nano_checkpoint

    folder = tmp_path_factory.mktemp("catalogue_nano")
    pieces = [piece for model in CATALOGUE for piece in re.findall(r"M\d+|x\d+|\d+|\w+", model.id)]
    extra = [*pieces, "batch", "majority", "assembly", "missing:", "right", "wrong"]
    known = list(nano_checkpoint.WORDS)
    try:
        nano_checkpoint.WORDS[:] = list(dict.fromkeys([*known, *extra]))
        nano_checkpoint.write_checkpoint(folder / "checkpoint", nano_checkpoint.word_tokenizer())
    finally:
        nano_checkpoint.WORDS[:] = known
    release = Release("nano", "0.1.0", 1, "fp32", thresholds={"size_tolerance": 100.0})
    write_bundle(folder / "checkpoint", folder / "bundle", release)
    return folder / "bundle"


@pytest.fixture(scope="session")
def inspector(bundle):
    from forge_station.opening import open_inspector

    opened = open_inspector(bundle, threads=1)
    with opened.model:
        yield opened


@pytest.fixture(scope="session")
def bolt_stl(tmp_path_factory) -> Path:
    """A nominal bolt M8x30 as ASCII STL, in mm."""
    from forge_station.sim import fasteners

    path = tmp_path_factory.mktemp("mesh") / "bolt.stl"
    mesh = fasteners.build(by_id("hex_bolt M8x30"))
    lines = ["solid bolt"]
    for corners in mesh.vertices[mesh.faces]:
        lines += ["facet normal 0 0 0", "outer loop"]
        lines += [f"vertex {x:.5f} {y:.5f} {z:.5f}" for x, y, z in corners]
        lines += ["endloop", "endfacet"]
    path.write_text("\n".join([*lines, "endsolid bolt", ""]))
    return path


@pytest.fixture(scope="session")
def recording(tmp_path_factory) -> Path:
    """A small recorded scan of two nuts from three poses."""
    from forge_station.sim import fasteners, scanner

    folder = tmp_path_factory.mktemp("recordings") / "two_nuts"
    rng = np.random.default_rng(0)
    nut = fasteners.build(by_id("hex_nut M8"))
    nut = nut.transformed(translation=[0, 0, -nut.bounds()[0][2]])
    nuts = [nut.transformed(translation=[x, 0, 0]) for x in (-13.0, 13.0)]
    rig = scanner.rig(scanner.scale_for(44, 20, 8), "overhead_front_side", (320, 240))
    stacks = [scanner.simulate(nuts, pose, rng, exposures=(1.0,)) for pose in rig]
    replay.write(folder, stacks, {pose.digest: pose for pose in rig})
    return folder


@pytest.fixture(scope="session")
def certified_bundle(bundle, tmp_path_factory) -> Path:
    """A copy of the bundle with a certificate for real scans and any score, see `certificates`."""
    folder = tmp_path_factory.mktemp("certified") / "bundle"
    shutil.copytree(bundle, folder)
    window = {"valid_from": "2020-01-01T00:00:00Z", "expires": "2999-01-01T00:00:00Z"}
    digest = read_manifest(folder).model_sha256
    found = certificates.certificate(999.0, simulated=False, model_sha256=digest, **window)
    certificates.write(folder, found)
    return folder
