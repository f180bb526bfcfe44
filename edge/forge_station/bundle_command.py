"""`forge-station bundle`: keys, signatures, the single file, and the store of a station."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_station import golden, private_key
from forge_station.bundles import archive
from forge_station.bundles.store import BundleStore, Version
from forge_station.bundles.trust import Trust
from forge_station.config import StationConfig, load_station
from forge_station.contract import seal as contract_seal
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import MANIFEST_NAME
from forge_station.contract.seal import (
    SEAL_NAME,
    Allowance,
    Seal,
    Signature,
    SignedAllowance,
)
from forge_station.errors import BundleError, ConfigError
from forge_station.opening import open_inspector
from forge_station.signing import PublicKey, public_key
from forge_station.vlm.bundle_files import BundleFiles, read_manifest, seal_bytes, verify_folder

REFUSED = 1
_ANYBODY = Trust(unsigned=True)

DESCRIPTION = """\
A bundle is a folder with a manifest, or the same as one file (.fsb, a tar). It is released by
signing it, and a station takes it only with the signatures that its station file asks for.

on the machine of the person who releases
  keygen NAME             a pair of keys: NAME.pem (private), NAME.pub.pem (for stations)
  sign BUNDLE --key K     add a signature; several people can sign one bundle
  pack FOLDER             one file for a download or a stick
  allow BUNDLE --key K    let stations go back to this older release

on the station (the station file says which keys count and where the store is)
  verify BUNDLE           signatures, digests, kinds of files
  install BUNDLE          verify it and put it into the store; the active one stays
  list                    what is in the store
  activate NAME           make it the active one, from the next start of the station on
  rollback                back to the last one that proved itself

A running station changes its bundle by the signed commands `deploy` and `rollback`, which try it
out first. docs/BUNDLES.md tells how they go. `forge-station bundle ACTION --help`: with examples.
"""
EPILOG = "exit codes: 0 done, 1 the bundle is refused and nothing has changed, 64 wrong usage"


_HELP: Mapping[str, tuple[str, str]] = {
    "keygen": (
        "make a pair of keys",
        """\
Write a pair of Ed25519 keys, NAME.pem (private, mode 0600) and NAME.pub.pem. No key that is there
is replaced: stations may trust it. Each person who releases or orders has a pair of his own.

examples
  forge-station bundle keygen release     release.pub.pem -> release.keys of the station files
  forge-station bundle keygen anna        anna.pub.pem -> commands.keys, role release: may order
  forge-station bundle keygen l7          l7.pem -> release.report_key of station l7 (no network),
                                          l7.pub.pem -> `key` of l7 in the plan of a rollout

exit codes: 0 written, 64 wrong usage, or a key of that name is there""",
    ),
    "sign": (
        "add a signature to a bundle, folder or file",
        """\
Release a bundle: check that it is whole, and add your signature over its manifest. Signatures of
others stay; that of the same key is replaced. A station whose release.threshold is 2 wants two.
BUNDLE is changed only when all of it is in order.

examples
  forge-station bundle sign bolts --key release.pem          a folder, before it is packed
  forge-station bundle sign bolts-7.fsb --key second.pem     a file, by the second releaser

exit codes: 0 signed, 1 the bundle is damaged and was not signed, 64 wrong usage or key""",
    ),
    "pack": (
        "write a bundle folder as one file",
        """\
Write the folder's bundle as one file, an uncompressed tar with manifest and signatures first: what
`deploy`, `rollout` and a stick bring. The same bundle gives the same bytes.

examples
  forge-station bundle pack bolts                      NAME-VERSION.fsb in the working directory
  forge-station bundle pack bolts --out bolts-7.fsb

exit codes: 0 written, 1 the bundle is damaged, 64 wrong usage""",
    ),
    "allow": (
        "sign that stations may go back to an older release",
        """\
A station takes no release that is older than one that has run on it. This signs an exception for
the one release of BUNDLE, with a key that stations have under release.keys, for some days. Going
back to a bundle that the store still has needs none: `bundle rollback`.

example
  forge-station bundle allow bolts-6.fsb --key release.pem --days 3 --out to-6.json
  forge-station bundle install bolts-6.fsb --allow to-6.json            at the station
In the signed command `deploy` allowDowngrade=6 says the same, in a rollout allow_downgrade.

exit codes: 0 signed, 1 the bundle is damaged, 64 wrong usage or key""",
    ),
    "verify": (
        "check a bundle as the station would",
        """\
Check signatures, digests and kinds of all files, as a station does at install and at every start.
Whose signature counts says the station file, or --public. Nothing is changed.

examples
  forge-station bundle verify bolts-7.fsb --station station.yaml
  forge-station bundle verify bolts --public release.pub.pem            without a station file
  forge-station bundle verify bolts --unsigned --self-test              is this machine up to it?
  forge-station bundle verify bolts --unsigned --repeat 41              how long it takes here

exit codes: 0 in order, 1 refused (or the self-test differs), 64 wrong usage""",
    ),
    "install": (
        "put a bundle into the station's store",
        """\
At the station: verify BUNDLE (folder or file) and put it into the store beside the others. It comes
in whole and flushed to disk, or not at all; the active bundle stays. The store is made where there
is nothing yet. Refused are a signature that does not count, a file that was altered, another
product line, and an older release than one that has run here (`bundle allow`).

examples
  forge-station bundle install bolts-7.fsb --station station.yaml
  forge-station bundle install bolts-7.fsb --activate              of a station that stands
  forge-station bundle install bolts-6.fsb --allow to-6.json       an older release, by permission

A running station: `forge-station command deploy`, or `rollout apply` from a stick; both try the
bundle out first and take it back when it is worse.

exit codes: 0 installed, 1 refused and nothing has changed, 64 wrong usage or station file""",
    ),
    "list": (
        "show what is in the store",
        """\
One line a bundle, the newest first: its name, release, precision, and whether it is active and has
proved itself (a rollback may come back to it).

exit codes: 0 done, 1 there is no store, 64 wrong usage or station file""",
    ),
    "activate": (
        "make a bundle of the store the active one",
        """\
At a station that stands: verify the bundle once more and make it the active one, in one step that a
power cut cannot leave half done. The station opens it at its next start. It counts as proved: who
activates by hand vouches for it, and no self-test, shadow or trial is made.

examples
  forge-station bundle list --station station.yaml
  forge-station bundle activate bolts-0.7.0-r7-1a2b3c4d5e6f --station station.yaml

exit codes: 0 active from the next start on, 1 refused and the old one stays, 64 wrong usage""",
    ),
    "rollback": (
        "back to the last bundle that proved itself",
        """\
At a station that stands: make the last bundle before the active one that proved itself the active
one, whatever its release. Damaged ones are passed over. A running station: `forge-station command
rollback jobId=...`.

exit codes: 0 back from the next start on, 1 there is none to go back to, 64 wrong usage""",
    ),
}
"""Action -> one line, and the description; its last paragraph comes last, behind the options."""


def add_arguments(command: argparse.ArgumentParser, station: Path) -> None:
    """Of `forge-station bundle`; `station`: the station file where none is named."""
    command.description, command.epilog = DESCRIPTION, EPILOG
    actions = command.add_subparsers(required=True, metavar="ACTION")

    def added(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        text, description = _HELP[name]
        description, _, codes = description.rpartition("\n\n")
        action = actions.add_parser(
            name, help=text, description=description, epilog=codes,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        action.set_defaults(run=lambda args: _or_refused(run, args))
        return action

    keygen = added("keygen", _keygen)
    keygen.add_argument("name", type=Path, metavar="NAME", help="writes NAME.pem and NAME.pub.pem")

    sign = added("sign", _sign)
    _bundle_argument(sign)
    _key_argument(sign)

    pack = added("pack", _pack)
    pack.add_argument("bundle", type=Path, metavar="FOLDER")
    pack.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: NAME-VERSION{archive.SUFFIX}"
    )

    allow = added("allow", _allow)
    _bundle_argument(allow)
    _key_argument(allow)
    allow.add_argument(
        "--days", type=int, default=7, metavar="N", help="how long it holds (default 7)"
    )
    allow.add_argument("--out", type=Path, required=True, metavar="FILE", help="writes this file")

    verify = added("verify", _verify)
    _bundle_argument(verify)
    verify.add_argument(
        "--public", action="append", default=[], metavar="KEY",
        help="check against this key (PEM or base64) instead of the station's; may be repeated",
    )  # fmt: skip
    verify.add_argument(
        "--threshold", type=int, default=1, metavar="N", help="with --public: signatures wanted"
    )
    verify.add_argument("--unsigned", action="store_true", help="do not ask who signed")
    verify.add_argument(
        "--repeat", type=int, default=1, metavar="N",
        help="do it N times and print how long it takes, on the clock and of CPU; folders only",
    )  # fmt: skip
    verify.add_argument(
        "--self-test", action="store_true",
        help="also open the model and judge the bundle's golden set on this device: verdicts, "
        "readings and classes must be those of the release; 1 if not, or without a set",
    )  # fmt: skip
    _station_argument(verify, station)

    install = added("install", _install)
    _bundle_argument(install)
    install.add_argument("--allow", type=Path, metavar="FILE", help="what `bundle allow` wrote")
    install.add_argument("--activate", action="store_true", help="and make it the active one")
    _store_arguments(install, station)

    _store_arguments(added("list", _list), station)

    activate = added("activate", _activate)
    activate.add_argument("name", metavar="NAME", help="as `bundle list` prints it")
    _store_arguments(activate, station)

    _store_arguments(added("rollback", _rollback), station)


def _or_refused(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    try:
        return run(args)
    except BundleError as error:
        return _refused(error)


def _keygen(args: argparse.Namespace) -> int:
    private = args.name.with_name(f"{args.name.name}.pem")
    public = args.name.with_name(f"{args.name.name}.pub.pem")
    key = private_key.generate(private, public)
    print(f"key {key.id}")
    print(f"{private}  private, of who signs; on a station only as its own release.report_key")
    print(f"{public}  for release.keys (who signs), commands.keys (who orders), or a plan (key)")
    return 0


def _sign(args: argparse.Namespace) -> int:
    key = private_key.read(args.key)
    if args.bundle.is_dir():
        found = _signed(args.bundle, key)
    else:
        with tempfile.TemporaryDirectory(dir=args.bundle.parent) as place:
            folder = Path(place) / "bundle"
            archive.take(args.bundle, folder, _ANYBODY)
            found = _signed(folder, key)
            archive.pack(folder, args.bundle)
    keys = ", ".join(item.key_id for item in found.signatures)
    print(f"{args.bundle}  signed by {keys}")
    return 0


def _signed(folder: Path, key: Ed25519PrivateKey) -> Seal:
    """Add the key's signature to a whole bundle folder."""
    verify_folder(folder, _ANYBODY)
    content = (folder / MANIFEST_NAME).read_bytes()
    own = Signature(private_key.public_half(key).id, private_key.sign(key, content))
    before = seal_bytes(folder)
    seal = Seal((own,))
    if before is not None:
        seal = contract_seal.parse(before, str(folder / SEAL_NAME)).with_signature(own)
    draft = folder / f".{SEAL_NAME}.part"
    draft.write_bytes(seal.to_json())
    draft.replace(folder / SEAL_NAME)
    return seal


def _pack(args: argparse.Namespace) -> int:
    manifest = read_manifest(args.bundle)
    out = args.out or Path(f"{manifest.name}-{manifest.version}{archive.SUFFIX}".replace("/", "_"))
    archive.pack(args.bundle, out, _progress)
    print(f"{out}  {out.stat().st_size} bytes, sha256 of the manifest {manifest.sha256}")
    return 0


def _allow(args: argparse.Namespace) -> int:
    key = private_key.read(args.key)
    manifest = _read(args.bundle, _ANYBODY).manifest
    until = datetime.now(timezone.utc) + timedelta(days=args.days)
    found = Allowance(
        manifest.line,
        manifest.name,
        manifest.release_counter,
        until.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    signature = private_key.sign(key, found.canonical())
    signed = SignedAllowance(found, private_key.public_half(key).id, signature)
    args.out.write_bytes(signed.to_json())
    print(f"{args.out}  {found.name}, release {found.release_counter}, until {found.expires}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    keys: list[PublicKey] = [public_key(item, Path.cwd()) for item in args.public]
    if args.unsigned:
        trust = _ANYBODY
    elif keys:
        trust = Trust(tuple(keys), args.threshold)
    else:
        trust = load_station(args.station).trust
    found = _read(args.bundle, trust)
    report = _self_test(args.bundle, trust) if args.self_test else None
    manifest = found.manifest
    signed = f"signed by {', '.join(found.signed_by)}" if found.signed_by else "not signed"
    size = sum(entry.size for entry in manifest.files.values())
    print(
        f"{manifest.name} {manifest.version}, release {manifest.release_counter}, line "
        f"{manifest.line or 'any'}: {len(manifest.files)} files, {size / 1e6:.1f} MB, {signed}"
    )
    if args.repeat > 1 and args.bundle.is_dir():
        spent = [_timed(args.bundle, trust) for _ in range(args.repeat)]
        wall, cpu = (sorted(times) for times in zip(*spent, strict=True))
        half = args.repeat // 2
        print(
            f"verified {args.repeat} times: fastest {wall[0]:.1f} ms, median {wall[half]:.1f} ms, "
            f"of CPU {cpu[0]:.1f} and {cpu[half]:.1f} ms"
        )
    if report is None:
        return 0
    print(
        f"self-test: {report.cases} golden parts, {len(report.different)} differences, defect "
        f"grids agree by {report.grid_iou:.3f}, p99 {report.p99_ms:.0f} ms"
    )
    if report.fault is not None:
        print(f"forge-station: self-test: {report.fault}", file=sys.stderr)
        return REFUSED
    return 0


def _self_test(bundle: Path, trust: Trust) -> golden.Report:
    """As a deployment does it, with the limits of a station file that names none."""
    with tempfile.TemporaryDirectory() as place:
        folder = bundle
        if not bundle.is_dir():
            folder = Path(place) / "bundle"
            archive.take(bundle, folder, trust)
        stored = golden.read(folder)
        if stored is None:
            raise BundleError(
                "the bundle has no golden set",
                which=bundle,
                action="export it with `export.bundle --golden CASES`",
            )
        inspector = open_inspector(folder, trust=trust)
        with inspector.model:
            return golden.run(inspector, *stored, golden.Tolerance())


def _timed(folder: Path, trust: Trust) -> tuple[float, float]:
    """Milliseconds that it took, and of CPU: what is left of a busy machine."""
    wall, cpu = time.perf_counter(), time.process_time()
    verify_folder(folder, trust)
    return (time.perf_counter() - wall) * 1000, (time.process_time() - cpu) * 1000


def _install(args: argparse.Namespace) -> int:
    station, root = _place(args)
    allowance = None
    if args.allow is not None:
        try:
            allowance = contract_seal.parse_allowance(args.allow.read_bytes(), str(args.allow))
        except OSError as error:
            raise ConfigError("file cannot be read", which=args.allow, got=error.strerror) from None
        except ContractError as error:
            return _refused(error)
    store = BundleStore.create(root, station.line.line)
    found = store.install(args.bundle, station.trust, allowance=allowance, progress=_progress)
    if args.activate:
        found = store.activate(found.name, station.trust, good=True)
        store.prune(station.release.keep)
    print(f"{found.name}  installed{', active from the next start on' if args.activate else ''}")
    return 0


def _list(args: argparse.Namespace) -> int:
    store = BundleStore(_place(args)[1])
    active = store.active
    for found in store.versions():
        print(_line_of(found, active))
    return 0


def _line_of(found: Version, active: Version | None) -> str:
    marks = ["active"] if active is not None and active.name == found.name else []
    marks += ["proved"] if found.good else []
    return f"{found.name}  {found.text}, {found.manifest.precision}  {', '.join(marks) or '-'}"


def _activate(args: argparse.Namespace) -> int:
    station, root = _place(args)
    store = BundleStore(root)
    found = store.activate(args.name, station.trust, good=True)
    store.prune(station.release.keep)
    print(f"{found.name}  active from the next start on")
    return 0


def _rollback(args: argparse.Namespace) -> int:
    station, root = _place(args)
    found = BundleStore(root).rollback(station.trust)
    print(f"{found.name}  active from the next start on")
    return 0


def _read(bundle: Path, trust: Trust) -> BundleFiles:
    """Verify a folder, or a file in a temporary one."""
    if bundle.is_dir():
        return verify_folder(bundle, trust)
    with tempfile.TemporaryDirectory() as place:
        return replace(archive.take(bundle, Path(place) / "bundle", trust), folder=bundle)


def _place(args: argparse.Namespace) -> tuple[StationConfig, Path]:
    station = load_station(args.station)
    return station, args.store or station.bundle


def _refused(error: Exception) -> int:
    print(f"forge-station: {error}", file=sys.stderr)
    return REFUSED


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\r{done / 1e6:.0f} of {total / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)


def _bundle_argument(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "bundle", type=Path, metavar="BUNDLE", help=f"folder, or one file ({archive.SUFFIX})"
    )


def _key_argument(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--key", type=Path, required=True, metavar="PEM", help="private key (bundle keygen)"
    )


def _store_arguments(action: argparse.ArgumentParser, station: Path) -> None:
    action.add_argument(
        "--store", type=Path, metavar="FOLDER", help="default: `bundle` of the station file"
    )
    _station_argument(action, station)


def _station_argument(action: argparse.ArgumentParser, station: Path) -> None:
    action.add_argument(
        "--station", type=Path, default=station, metavar="FILE", help=f"default {station}"
    )
