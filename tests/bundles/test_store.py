"""Slots: the active bundle changes in one step, goes back, and never down without permission."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from forge_station import cli
from forge_station.bundles import store as bundle_store
from forge_station.bundles.store import BundleStore, in_use
from forge_station.contract.seal import Allowance, SignedAllowance
from forge_station.errors import BundleError
from tests.bundles import rig
from tests.bundles.rig import Signer


@pytest.fixture
def signer() -> Signer:
    return Signer.new()


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return BundleStore.create(tmp_path / "store", "l1")


def installed(store: BundleStore, signer: Signer, release: int, **changes: str) -> str:
    folder = store.root.parent / f"b{release}-{len(changes)}"
    rig.write(folder, signer, release=release, version=f"1.{release}.0", **changes)  # type: ignore[arg-type]
    return store.install(folder, signer.trust).name


def test_versions_lie_side_by_side_and_one_is_active(store: BundleStore, signer: Signer) -> None:
    with pytest.raises(BundleError, match="no bundle is active"):
        in_use(store.root)
    one, two = installed(store, signer, 1), installed(store, signer, 2)
    assert store.active is None
    store.activate(one, signer.trust, good=True)
    assert in_use(store.root) == store.root / "versions" / one
    store.activate(two, signer.trust, good=True)
    assert store.active is not None and store.active.name == two
    assert store.rollback(signer.trust).name == one
    assert in_use(store.root).name == one
    with pytest.raises(BundleError, match="nothing to go back to"):
        store.rollback(signer.trust)
    assert in_use(store.root).name == one


def test_a_version_on_trial_is_no_place_to_go_back_to(store: BundleStore, signer: Signer) -> None:
    names = [installed(store, signer, n) for n in (1, 2, 3)]
    store.activate(names[0], signer.trust, good=True)
    store.activate(names[1], signer.trust)
    store.activate(names[2], signer.trust, good=True)
    assert store.rollback(signer.trust).name == names[0]


def test_rollback_passes_over_a_damaged_version(store: BundleStore, signer: Signer) -> None:
    names = [installed(store, signer, n) for n in (1, 2, 3)]
    for name in names:
        store.activate(name, signer.trust, good=True)
    path = store.root / "versions" / names[1] / "notes.json"
    path.write_bytes(path.read_bytes()[:-1])
    assert store.rollback(signer.trust).name == names[0]


def test_a_damaged_version_is_not_activated(store: BundleStore, signer: Signer) -> None:
    one, two = installed(store, signer, 1), installed(store, signer, 2)
    store.activate(one, signer.trust, good=True)
    path = store.root / "versions" / two / "notes.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match="wrong size"):
        store.activate(two, signer.trust)
    assert in_use(store.root).name == one


def test_a_bundle_of_another_line_is_refused(store: BundleStore, signer: Signer) -> None:
    with pytest.raises(BundleError, match="another product line"):
        installed(store, signer, 1, line="l2")
    assert store.versions() == []
    assert list((store.root / "incoming").iterdir()) == []


def allowance(
    signer: Signer, release: int, *, days: int = 1, name: str = "nuts"
) -> SignedAllowance:
    until = datetime.now(timezone.utc) + timedelta(days=days)
    found = Allowance("l1", name, release, until.strftime("%Y-%m-%dT%H:%M:%SZ"))
    signature = signer.signature(found.canonical())
    return SignedAllowance(found, signature.key_id, signature.signature)


def test_an_older_release_needs_a_signed_allowance(
    store: BundleStore, signer: Signer, tmp_path: Path
) -> None:
    store.activate(installed(store, signer, 5), signer.trust, good=True)
    old = tmp_path / "old"
    rig.write(old, signer, release=4)
    stranger = Signer.new()
    for given, said in (
        (None, "release 5 or later"),
        (allowance(stranger, 4), "does not trust"),
        (allowance(signer, 3), "it is for nuts, release 3"),
        (allowance(signer, 4, name="bolts"), "it is for bolts"),
        (allowance(signer, 4, days=-1), "expired"),
    ):
        with pytest.raises(BundleError, match=said):
            store.install(old, signer.trust, allowance=given)
    name = store.install(old, signer.trust, allowance=allowance(signer, 4)).name
    store.activate(name, signer.trust, good=True)
    later = tmp_path / "later"
    rig.write(later, signer, release=4, version="9.0.0")
    with pytest.raises(BundleError, match="release 5 or later"):
        store.install(later, signer.trust)


def test_a_release_number_names_one_bundle(store: BundleStore, signer: Signer) -> None:
    store.activate(installed(store, signer, 5), signer.trust, good=True)
    other = store.root.parent / "other"
    rig.write(other, signer, release=5, version="5.5.5")
    with pytest.raises(BundleError, match="another bundle has run here under this release"):
        store.install(other, signer.trust)


def test_the_oldest_go_first_but_never_what_is_in_use(store: BundleStore, signer: Signer) -> None:
    names = [installed(store, signer, n) for n in (1, 2, 3, 4, 5)]
    for number, name in enumerate(names, 1):
        os.utime(store.root / "versions" / name, (number, number))
    store.activate(names[0], signer.trust, good=True)
    store.activate(names[1], signer.trust, good=True)
    store.prune(3)
    left = {version.name for version in store.versions()}
    assert len(left) == 3 and {names[0], names[1]} <= left
    store.prune(1)
    assert {version.name for version in store.versions()} == {names[0], names[1]}
    assert store.rollback(signer.trust).name == names[0]


def test_a_change_that_is_cut_off_leaves_the_old_bundle(
    store: BundleStore, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes before the one rename can fail: the pointer still names the old one."""
    one, two = installed(store, signer, 1), installed(store, signer, 2)
    store.activate(one, signer.trust, good=True)
    before = Path.symlink_to

    def cut(self: Path, *_: object) -> None:
        raise OSError(5, "power cut")

    monkeypatch.setattr(Path, "symlink_to", cut)
    with pytest.raises(BundleError, match="power cut"):
        store.activate(two, signer.trust)
    monkeypatch.setattr(Path, "symlink_to", before)
    assert in_use(store.root).name == one
    assert store.activate(two, signer.trust).name == two


def test_a_store_whose_record_is_lost_takes_nothing(store: BundleStore, signer: Signer) -> None:
    (store.root / bundle_store.STATE).write_text("{}")
    with pytest.raises(BundleError, match="record cannot be read"):
        installed(store, signer, 1)


def test_a_folder_of_something_else_is_not_made_a_store(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    with pytest.raises(BundleError, match="something else"):
        BundleStore.create(tmp_path / "photos", "l1")


def test_from_the_command_line(
    tmp_path: Path, station_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def does(*words: object) -> int:
        return cli.main(["bundle", *map(str, words)])

    place = ["--station", station_file]
    assert does("keygen", tmp_path / "release") == 0
    assert (tmp_path / "release.pem").stat().st_mode & 0o077 == 0
    for release in (1, 2):
        folder = tmp_path / f"b{release}"
        rig.write(folder, release=release, version=f"{release}.0.0")
        assert does("verify", folder, *place) == 1
        assert "not signed" in capsys.readouterr().err
        assert does("pack", folder, "--out", tmp_path / f"{release}.fsb") == 0
        assert does("sign", tmp_path / f"{release}.fsb", "--key", tmp_path / "release.pem") == 0
        assert does("verify", tmp_path / f"{release}.fsb", *place) == 0
        assert does("install", tmp_path / f"{release}.fsb", "--activate", *place) == 0
    capsys.readouterr()
    assert does("list", *place) == 0
    newest, oldest = capsys.readouterr().out.splitlines()
    assert newest.startswith("nuts-2.0.0-r2-") and "active" in newest
    assert does("rollback", *place) == 0
    assert capsys.readouterr().out.split()[0] == oldest.split()[0]
    assert does("rollback", *place) == 1
    assert does("activate", newest.split()[0], *place) == 0
    assert does("install", tmp_path / "1.fsb", *place) == 1
    capsys.readouterr()
    key = ["--key", tmp_path / "release.pem"]
    assert does("allow", tmp_path / "1.fsb", *key, "--out", tmp_path / "down.json") == 0
    assert does("install", tmp_path / "1.fsb", "--allow", tmp_path / "down.json", *place) == 0
