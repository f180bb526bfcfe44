#!/usr/bin/env bash
# A folder with everything that a station installs: see usage.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: deploy/wheelhouse.sh [options] DIR

Collect in DIR the wheel of forge-station, every wheel that it needs, and requirements.txt with the
SHA-256 of each. Needs pip and its package index; the station then needs neither:

  python3 -m venv /opt/forge-station
  /opt/forge-station/bin/pip install --no-index --find-links DIR --require-hashes -r DIR/requirements.txt

options
  --extras A,B      extras of forge-station (plc, commands, metrics, projector, basler, ...)
  --wheel FILE      that wheel (default: built from this checkout)
  --python X.Y      Python of the station (default: that of this machine)
  --arch ARCH       its processor: x86_64 or aarch64 (default: as here)
  --glibc 2.N       its C library: 2.35 Ubuntu 22.04 and JetPack 6, 2.36 Debian 12 (default: as here)

Only wheels are taken: nothing is compiled, here or there. PYTHON=... picks the Python that runs pip.
TEXT
}

fail() { echo "wheelhouse.sh: $1" >&2; exit 64; }

python=${PYTHON:-python3}
extras='' wheel='' version='' arch='' glibc='' folder=''
while test $# -gt 0; do
  case $1 in
    --extras) extras="[${2:?}]"; shift 2 ;;
    --wheel) wheel=${2:?}; shift 2 ;;
    --python) version=${2:?}; shift 2 ;;
    --arch) arch=${2:?}; shift 2 ;;
    --glibc) glibc=${2:?}; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    -*) fail "unknown option $1; see --help" ;;
    *) test -z "$folder" || fail "one DIR, got also $1"; folder=$1; shift ;;
  esac
done
test -n "$folder" || { usage >&2; exit 64; }
test -z "$(ls -A "$folder" 2>/dev/null)" || fail "$folder is not empty: name a new folder"

new=$(mktemp -d "$(dirname "$folder")/.wheelhouse-XXXXXX")
trap 'rm -rf "$new"' EXIT
if test -z "$wheel"; then
  checkout=$(cd "$(dirname "$0")/.." && pwd)
  echo "building the wheel of $checkout"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$new" "$checkout"
else
  test -f "$wheel" || fail "no wheel $wheel"
  cp "$wheel" "$new"
fi
wheel=$(ls "$new"/forge_station-*.whl)

options=()
if test -n "$version$arch$glibc"; then
  : "${version:=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}"
  : "${arch:=$(uname -m)}"
  : "${glibc:=$("$python" -c 'import platform; print(platform.libc_ver()[1])')}"
  options=(--python-version "$version" --implementation cp --abi "cp${version/./}" --abi abi3 --abi none)
  # pip takes the tags that it is told, and none of the older ones that would do as well.
  for number in $(seq "${glibc#2.}" -1 17); do options+=(--platform "manylinux_2_${number}_$arch"); done
  options+=(--platform "manylinux2014_$arch" --platform "linux_$arch")
  if test "$arch" = x86_64; then
    options+=(--platform manylinux2010_x86_64 --platform manylinux1_x86_64)
  fi
fi
echo "collecting wheels for ${version:-this Python}${arch:+ on $arch}${glibc:+, glibc $glibc}"
"$python" -m pip download --quiet --only-binary :all: ${options[@]+"${options[@]}"} \
  --dest "$new" "$wheel$extras"

EXTRAS=$extras "$python" - "$new" <<'CODE'
import hashlib, os, pathlib, sys

folder = pathlib.Path(sys.argv[1])
lines = []
for file in sorted(folder.glob("*.whl")):
    name, version = file.name.split("-")[:2]
    extras = os.environ["EXTRAS"] if name == "forge_station" else ""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    lines.append(f"{name.replace('_', '-')}{extras}=={version} --hash=sha256:{digest}\n")
(folder / "requirements.txt").write_text("".join(lines))
CODE
chmod 755 "$new"
mkdir -p "$folder" && rmdir "$folder"
mv "$new" "$folder"
echo "$folder: $(ls "$folder" | grep -c '\.whl$') wheels, $(du -sh "$folder" | cut -f1)"
