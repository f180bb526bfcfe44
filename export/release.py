"""A release: what a person decides about a bundle, and the manifest that follows from it.

It opens no file and writes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export import model_card
from export.drift import Drift
from export.network import Network
from export.tensors import Checkpoint
from forge_station.contract import CONTRACT_VERSION, record
from forge_station.contract.manifest import (
    FileEntry,
    Manifest,
    PhotoInput,
    Vocabulary,
)
from forge_station.contract.views import (
    CHANNELS,
    LARGE_LAYOUT,
    NANO_LAYOUT,
    Layout,
)
from forge_station.vlm.text import TextCodec

CARD = "MODEL_CARD.md"
LAYOUTS: dict[str, Layout] = {"nano": NANO_LAYOUT, "large": LARGE_LAYOUT}
QUANTIZERS = ("rtn", "hqq", "gptq")


@dataclass(frozen=True)
class Release:
    """What a person decides about a bundle."""

    name: str
    version: str
    release_counter: int = 1
    precision: str = "int8"
    target: str = "cpu"
    quantizer: str = "rtn"
    """How 4-bit weights are chosen: `rtn`, `hqq` or `gptq`."""
    calibration: Path | None = None
    """Recorded questions (`training.questions`) for `gptq`."""
    layout: str | None = None
    """`nano` or `large` pictures; None: nano for a window of 56 px."""
    line: Path | None = None
    references: Path | None = None
    """`references.npz` of the line's parts, for a model that is shown the difference from them."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    detectable: tuple[Mapping[str, Any], ...] = ()
    """Reports of `training.calibrate pod`: the promised sizes of the model card."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    created: str = ""


def manifest_of(
    checkpoint: Checkpoint,
    network: Network,
    codec: TextCodec,
    card: Mapping[str, Any],
    line: str,
    release: Release,
    files: Mapping[str, FileEntry],
    drift: Drift | None,
) -> Manifest:
    """The manifest of a release; `files` may be empty in a draft. `drift`: what the gate found."""
    text, vision = network.text, network.vision
    figures = model_card.brief(release.evaluation)
    layout = LAYOUTS[release.layout or ("nano" if vision.geometry.window == 56 else "large")]
    tokens = {"vocab_size": text.vocab_size, "image_pad": network.image_token}
    tokens["tokenizer_size"] = codec.vocab_size
    if text.eos is not None:
        tokens["eos"] = text.eos
    return Manifest(
        name=release.name,
        version=release.version,
        release_counter=release.release_counter,
        contract_version=CONTRACT_VERSION,
        precision=release.precision,
        files=files or {CARD: FileEntry.of(b"")},
        images={"sheet": layout.sheet_size, "surface": layout.surface_size},
        tokens=tokens,
        model={
            "parameters": checkpoint.parameters,
            "target": release.target,
            **({"quantizer": release.quantizer} if release.precision == "w4a16" else {}),
            "patch": vision.geometry.patch,
            "merge": vision.geometry.merge,
            "temporal": vision.geometry.temporal,
            "window": vision.geometry.window,
            "full_attention_blocks": list(vision.full_attention_blocks),
            "vision_layers": vision.depth,
            "vision_hidden_size": vision.hidden_size,
            "layers": text.layers,
            "hidden_size": text.hidden_size,
            "heads": text.heads,
            "kv_heads": text.kv_heads,
            "head_dim": text.head_dim,
            "mrope_section": list(text.mrope_section),
            "none_weight": float(card.get("none_weight", 1.0)),
            "cell_px": layout.cell,
            "panel_px": layout.panel,
        },
        thresholds={**card.get("thresholds", {}), **release.thresholds},
        training={
            **card,
            **({"evaluation": figures} if figures else {}),
            **({"drift": drift.to_dict()} if drift is not None else {}),
        },
        created=release.created,
        line=line,
        surface_channels=surface_channels(card),
        vocabulary=record.read(Vocabulary, card.get("vocabulary", {}), "training card, vocabulary"),
        photo=_photo_input(card),
    )


def _photo_input(card: Mapping[str, Any]) -> PhotoInput | None:
    """What the training card says of photos; None for a model of scans."""
    if card.get("photo") is None:
        return None
    return record.read(PhotoInput, card["photo"], "training card, photo")


def surface_channels(card: Mapping[str, Any]) -> tuple[str, str, str]:
    first, second, third = card.get("surface_channels", CHANNELS)
    return str(first), str(second), str(third)
