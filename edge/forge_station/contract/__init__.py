"""What all sides agree on: station, export and training. Standard library and numpy, no I/O.

`CONTRACT_VERSION` names the whole agreement (views, prompts, answers, grid, verdict). A bundle
made under another major number is refused at load.
"""

from forge_station.contract.error import ContractError, StationError

CONTRACT_VERSION = "1.0"

__all__ = ["CONTRACT_VERSION", "ContractError", "StationError"]
