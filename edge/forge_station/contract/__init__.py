"""What all sides agree on: station, export and training. Standard library and numpy, no I/O.

`CONTRACT_VERSION` names the agreement between a model and the station that runs it (views, prompts,
answers, grid). A bundle made under another number is refused at load.
"""

from forge_station.contract.error import ContractError, StationError

CONTRACT_VERSION = 1

__all__ = ["CONTRACT_VERSION", "ContractError", "StationError"]
