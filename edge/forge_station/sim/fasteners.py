"""The mesh of any catalogue part in its own frame.

It knows one part and nothing of trays, poses or defects. Axis along z; screws have their bearing
face at z = 0, the head above and the tip at z = -l (countersunk and set screws: top at z = 0);
nuts, washers, blocks and clamps stand on z = 0; pins reach from z = -l to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from forge_station.contract.catalogue import PartModel
from forge_station.sim import fixtures, nuts, screws
from forge_station.sim.make import Make, draw, nominal
from forge_station.sim.mesh import Mesh


def build(model: PartModel, rng: np.random.Generator | None = None) -> Mesh:
    """Mesh of one part of `model`, mm, own frame; closed, faces outwards.

    Without `rng`: the nominal part, equal on every call. With `rng`: one real part. Its dimensions
    lie inside the tolerance band (nut heights: of ISO 4032 or of the lower DIN 934) and it has the
    choices that standards leave to the maker: chamfers, fillets, knurls, washer faces, thread ends,
    worn or unresolved threads, shallow or filled sockets, and the facet count.
    """
    make = nominal(model) if rng is None else draw(model, rng)
    return _BUILDERS[model.workpiece](model.dims, make)


_BUILDERS: Mapping[str, Callable[[Mapping[str, float], Make], Mesh]] = {
    "hex_bolt": screws.hex_bolt,
    "socket_cap_screw": screws.cap_screw,
    "button_head_screw": screws.button_head,
    "countersunk_screw": screws.countersunk,
    "set_screw": screws.set_screw,
    "hex_nut": nuts.hex_nut,
    "flange_nut": nuts.flange_nut,
    "cap_nut": nuts.cap_nut,
    "wing_nut": nuts.wing_nut,
    "flat_washer": nuts.flat_washer,
    "spring_washer": nuts.spring_washer,
    "pin": screws.pin,
    "rivet": screws.rivet,
    "step_block": fixtures.step_block,
    "strap_clamp": fixtures.strap_clamp,
    "t_slot_bolt": screws.t_slot_bolt,
}
