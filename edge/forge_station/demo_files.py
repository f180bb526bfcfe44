"""The demo station's files: station and line file, bundle, certificate key. They are in the wheel.

In a checkout they lie in station_config/demo. `unpack` gives a copy to whoever has the wheel alone:
a station file wants to be read, edited and pointed elsewhere, and what it writes (`../../out`) does
not belong beside installed code.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from forge_station.errors import ConfigError

STATION = Path("station_config/demo/station.yaml")
"""Where the demo station is looked for, from the working directory."""
_HERE = Path(__file__).resolve()
_PLACES = (_HERE.with_name("demo_station"), _HERE.parents[2] / STATION.parent)


def source() -> Path:
    """The installed files, or those of the checkout. Raises ConfigError."""
    for folder in _PLACES:
        if (folder / STATION.name).is_file():
            return folder
    raise ConfigError(
        "the files of the demo station are not installed",
        which=_PLACES[0],
        action="install the wheel of forge-station anew",
    )


def unpack() -> None:
    """Copy the files to where STATION points, whole or not at all.

    Raises ConfigError when something is there already, or nothing can be written.
    """
    target = STATION.parent
    found = source()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and any(target.iterdir()):
            raise ConfigError(
                "the folder is not empty",
                which=target,
                expected="nothing there",
                action="use what is there, or work in another folder",
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as made:
            # copyfile: the copy can be edited, whatever the mode of the installed files
            copied = shutil.copytree(found, Path(made) / "files", copy_function=shutil.copyfile)
            copied.rename(target)
    except OSError as error:
        raise ConfigError(
            "the files of the demo station cannot be written",
            which=target.absolute(),
            got=error.strerror or str(error),
            action="work in a folder that you may write to",
        ) from error
