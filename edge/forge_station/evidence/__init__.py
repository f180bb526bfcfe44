"""What is kept of each part: pictures and verdict for people, the model's input, the case.

`pictures` draws, `files` writes. With the `case` a verdict can be made again, bit for bit; `store`
is the folder with its index and its quota, `keeper` the thread that fills it beside the line.
"""

from forge_station.evidence.files import (
    Stored,
    default_name,
    file_name,
    inputs_of,
    store,
    store_files,
)
from forge_station.evidence.pictures import ReadyViews, picture_of

__all__ = [
    "ReadyViews",
    "Stored",
    "default_name",
    "file_name",
    "inputs_of",
    "picture_of",
    "store",
    "store_files",
]
