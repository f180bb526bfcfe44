"""Pictures and text -> model inputs of Qwen2.5-VL, without torchvision.

The published processor needs torchvision for its video branch. This one has none, and gives the
same tensors bit for bit as the published processor with its PIL image processor. It is built from
our own numbers and never from a checkpoint folder: there `from_pretrained` picks the torchvision
resize where torchvision exists, whose pixels differ by up to 0.33 of a standard deviation.

Pictures whose sides are multiples of 28 px between `MIN_PIXELS` and `MAX_PIXELS` pass as they are,
which is what a station sends; others are resized as the published processor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from forge_station.contract.error import ContractError
from training.large.checkpoint import TOKENIZER, checkpoint_file

IMAGE_TOKEN = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, "<|video_pad|>")
"""What an answer must never hold: a sampled one would be taken for a picture."""
MIN_PIXELS, MAX_PIXELS = 56 * 56, 1280 * 28 * 28
PADDING_SIDE = "left"
"""With "right", GRPO pads token ids left and picture markers right, and trains on nonsense."""


class VisionTextProcessor(ProcessorMixin):
    """Qwen2.5-VL processor of pictures and text; argument names define its two parts."""

    return_mm_token_type_ids = True

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        **_: Any,
    ) -> None:
        self.image_token = IMAGE_TOKEN
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """As many image tokens as the picture has."""
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "mm_token_type_ids"]


def load_processor(
    model: str, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS
) -> VisionTextProcessor:
    """The processor of a checkpoint (folder or hub name): its tokenizer.json, our image sizes."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint_file(model, TOKENIZER)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side=PADDING_SIDE,
    )
    lacking = [name for name in VISION_TOKENS[:3] if name not in tokenizer.get_vocab()]
    if lacking:
        raise ContractError(
            "not a tokenizer of Qwen2.5-VL",
            which=f"{model}/{TOKENIZER}",
            expected="the tokens of pictures",
            got=f"none called {', '.join(lacking)}",
        )
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": min_pixels, "longest_edge": max_pixels}
    )
    template = resources.files("trl") / "chat_templates" / "qwen2_5_vl.jinja"
    return VisionTextProcessor(images, tokenizer, chat_template=template.read_text())


def require_left_padding(processor: VisionTextProcessor) -> None:
    """ContractError where the tokenizer would pad on the right."""
    side = processor.tokenizer.padding_side
    if side != PADDING_SIDE:
        raise ContractError(
            "the tokenizer pads on the wrong side",
            expected=PADDING_SIDE,
            got=side,
            action="GRPO pads ids left and picture markers by the tokenizer; load the processor "
            "with training.large.processor.load_processor",
        )


def suppressed_tokens(processor: VisionTextProcessor) -> list[int]:
    """Ids that sampling must never choose."""
    known = processor.tokenizer.get_vocab()
    return [known[name] for name in VISION_TOKENS if name in known]


def token_grid(processor: VisionTextProcessor, size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) of a picture in px -> (rows, columns) of its language tokens."""
    images = processor.image_processor
    side = images.patch_size * images.merge_size
    height, width = smart_resize(
        size[1],
        size[0],
        factor=side,
        min_pixels=images.size["shortest_edge"],
        max_pixels=images.size["longest_edge"],
    )
    return height // side, width // side


def open_pictures(paths: Sequence[str | Path]) -> list[Image.Image]:
    """RGB pictures; ContractError names the first that cannot be read."""
    found = []
    for path in paths:
        try:
            with Image.open(path) as picture:
                found.append(picture.convert("RGB"))
        except OSError as error:
            raise ContractError("picture cannot be read", which=path, got=error) from error
    return found


def picture_sizes(paths: Sequence[str | Path]) -> list[tuple[int, int]]:
    """(width, height) of pictures, from their headers only."""
    sizes = []
    for path in paths:
        try:
            with Image.open(path) as picture:
                sizes.append(picture.size)
        except OSError as error:
            raise ContractError("picture cannot be read", which=path, got=error) from error
    return sizes
