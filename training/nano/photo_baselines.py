"""What the nano model is held against on photos: a small U-Net, patches, trivial answers.

The U-Net gets the same pictures, variations, 16 x 16 grids and CPU minutes as the nano model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from forge_station.contract.grid import SIDE
from forge_station.contract.manifest import PhotoInput
from training.nano.photo import rate_at
from training.nano.photo_samples import PhotoSample, PhotoSet, Variation, images_of

_LEARNING_RATE = 2e-3
_PATCH_PX = 14
_RIDGE = 10.0


def _block(inner: int, outer: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
        nn.GroupNorm(8, outer),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """[B, 3, H, W] -> logits of defective cells [B, 16, 16] and of classes [B, classes].

    Four resolutions, 0.5 M parameters; the cells are averaged from the second finest.
    """

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        inner = (3, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(_block(a, b, 2), _block(b, b)) for a, b in zip(inner, widths, strict=True)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))[:-1]
        self.up = nn.ModuleList(_block(a + b, b) for a, b in pairs)
        self.cell = nn.Conv2d(pairs[-1][1], 1, 1)
        self.kind = nn.Linear(2 * widths[-1], classes)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        levels = []
        x = images
        for stage in self.down:
            x = stage(x)
            levels.append(x)
        kind = self.kind(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))
        for stage, finer in zip(self.up, levels[-2:0:-1], strict=True):
            x = F.interpolate(x, finer.shape[-2:], mode="nearest")
            x = stage(torch.cat([x, finer], 1))
        return self.cell(F.adaptive_avg_pool2d(x, (SIDE, SIDE)))[:, 0], kind


def train_unet(
    samples: Sequence[PhotoSample],
    classes: Sequence[str],
    photo: PhotoInput,
    variation: Variation,
    minutes: float,
    *,
    steps: int | None = None,
    batch: int = 16,
    seed: int = 0,
) -> UNet:
    """Train for so many CPU minutes or steps.

    Loss: cross-entropy of class and cells, and Dice of the cells.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = UNet(len(classes)).train()
    drawn = PhotoSet(samples, variation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    used, step, over = 0.0, 0, 0.0
    bar = tqdm(total=1000, unit="‰", mininterval=5, desc="U-Net")
    while over < 1:
        begun = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * rate_at(over, 0.4)
        part = drawn.draw(batch, rng)
        cells, kind = model(_normalised(images_of(part, photo)))
        truth = torch.from_numpy(
            np.stack([np.ascontiguousarray(s.cells) for s in part]).astype(np.float32)
        )
        names = torch.tensor([list(classes).index(s.defect or "") for s in part])
        chance = cells.sigmoid()
        overlap = 2 * (chance * truth).sum() + 1
        dice = 1 - overlap / (chance.sum() + truth.sum() + 1)
        loss = F.cross_entropy(kind, names) + dice
        loss = loss + 2 * F.binary_cross_entropy_with_logits(cells, truth)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        used += time.process_time() - begun
        over = used / (60 * minutes) if steps is None else step / steps
        bar.update(min(1000, round(1000 * over)) - bar.n)
        bar.set_postfix(step=step, loss=f"{float(loss.detach()):.2f}", refresh=False)
    bar.close()
    return model.eval()


def _normalised(images: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def unet_answers(
    model: UNet, samples: Sequence[PhotoSample], photo: PhotoInput
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """(class odds [N, classes], cells bool [N, 16, 16] at probability 0.5)."""
    odds, grids = [], []
    for start in range(0, len(samples), 16):
        part = samples[start : start + 16]
        cells, kind = model(_normalised(images_of(part, photo)))
        odds.append(kind.double().softmax(-1).numpy())
        grids.append((cells > 0).numpy())
    return np.concatenate(odds), np.concatenate(grids)


def mean_map(samples: Sequence[PhotoSample]) -> NDArray[np.bool_]:
    """The one grid bool [16, 16] that agrees best with all defective training samples."""
    grids = np.stack([s.cells for s in samples if s.cells is not None and s.cells.any()])
    share = grids.mean(0)

    def agreement(level: float) -> float:
        answer = share >= level
        both, either = (grids & answer).sum((1, 2)), (grids | answer).sum((1, 2))
        return float((both / either).mean())

    return np.asarray(share >= max(np.unique(share[share > 0]), key=agreement))


class PatchClassifier:
    """What stands at a place: ridge regression on the place's shrunken picture, one for all."""

    def __init__(
        self, samples: Sequence[PhotoSample], parts: Sequence[str], layout: tuple[int, int]
    ) -> None:
        self.parts, self.layout = tuple(parts), layout
        rows, wanted = [], []
        for sample in samples:
            rows.append(_patches(sample, layout))
            wanted += [self.parts.index(what) for what in sample.places.values()]
        features = np.concatenate(rows)
        self.mean, self.spread = features.mean(0), features.std(0) + 1e-3
        x = self._scaled(features)
        y = np.eye(len(self.parts))[wanted]
        self.weights = np.linalg.solve(x.T @ x + _RIDGE * np.eye(x.shape[1]), x.T @ y)

    def __call__(self, sample: PhotoSample) -> dict[str, str]:
        """Mark -> part."""
        best = (self._scaled(_patches(sample, self.layout)) @ self.weights).argmax(1)
        return {mark: self.parts[i] for mark, i in zip(sample.places, best, strict=True)}

    def _scaled(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        x = (features - self.mean) / self.spread
        return np.concatenate([x, np.ones((len(x), 1))], 1)


def _patches(sample: PhotoSample, layout: tuple[int, int]) -> NDArray[np.float64]:
    """float64 [places, 3 * 14 * 14], in the order of the marks."""
    rows, columns = layout
    height, width = sample.image.shape[:2]
    out = []
    for number in range(len(sample.places)):
        row, column = divmod(number, columns)
        area = sample.image[
            height * row // rows : height * (row + 1) // rows,
            width * column // columns : width * (column + 1) // columns,
        ]
        small = cv2.resize(area, (_PATCH_PX, _PATCH_PX), interpolation=cv2.INTER_AREA)
        out.append(small.astype(np.float64).ravel() / 255)
    return np.stack(out)


def usual_places(samples: Sequence[PhotoSample]) -> dict[str, str]:
    """Mark -> what stands there most often."""
    marks: dict[str, list[str]] = {}
    for sample in samples:
        for mark, what in sample.places.items():
            marks.setdefault(mark, []).append(what)
    return {mark: max(sorted(set(seen)), key=seen.count) for mark, seen in marks.items()}


def trivial_odds(samples: Sequence[PhotoSample], classes: Sequence[str]) -> dict[str, float]:
    """Class -> its share of the samples: the answer that looks at nothing."""
    kinds = [sample.defect for sample in samples]
    return {name: kinds.count(name) / len(kinds) for name in classes}
