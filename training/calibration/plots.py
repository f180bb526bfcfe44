"""Pictures of a certification: what a limit costs, where scores lie, how honest odds are, POD."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from forge_station.checks import CERTAIN
from forge_station.contract import binomial
from training.calibration import limits
from training.calibration.certify import Certified
from training.calibration.parts import Part
from training.calibration.pod import ALL, Curve, Refused

Array = NDArray[np.float64]
GOOD, BAD, LIMIT, GREY = "#2b6cb0", "#b00020", "#1a1a1a", "#777777"
_SHOWN = 30.0
"""Scores beyond are drawn at the edge: they are certain for every purpose."""
_BINS = 10


def tradeoff(done: Certified) -> bytes:
    """Share of good parts that do not pass against share of defective ones that do."""
    _, escaped, held = limits.curve(done.found, done.temperatures)
    chosen, target = done.certificate, done.certificate.escape
    bad, good = done.found.of(defective=True), done.found.of(defective=False)
    at = float(np.mean([part.reach(done.temperatures) < chosen.limit_pass for part in bad]))
    cost = 1.0 - float(
        np.mean([part.reach(done.temperatures) < chosen.limit_pass for part in good])
    )
    figure, axes = _figure("Good parts held back against defective parts passed")
    axes.step(np.array(escaped) * 100, np.array(held) * 100, color=GOOD, where="post", lw=2)
    axes.axvline(100 * target, color=BAD, ls="--", lw=1)
    axes.text(100 * target, 96, f" claimed: {100 * target:g} %", color=BAD, va="top")
    axes.plot([100 * at], [100 * cost], "o", color=LIMIT, ms=9, zorder=5)
    axes.annotate(
        f"limit {chosen.limit_pass:.2f}: {100 * at:.2g} % escape, {100 * cost:.1f} % held back",
        (100 * at, 100 * cost), xytext=(14, 14), textcoords="offset points",
    )  # fmt: skip
    axes.set_xlabel(f"escape: defective parts that pass, % of {len(bad)}")
    axes.set_ylabel(f"good parts UNSURE or FAIL, % of {len(good)}")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(-0.1, max(100 * max(escaped), 200 * target))
    axes.set_ylim(0, 100)
    ticks = [tick for tick in (0, 0.5, 1, 2, 5, 10, 20, 50, 100) if tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    return _png(figure)


def limits_curve(
    limits_: Sequence[float],
    curves: Mapping[str, Sequence[tuple[float, float, float]]],
    suggested: Mapping[str, float],
    now: Mapping[str, float],
) -> bytes:
    """Shares over a limit, each (share, low, high) of 95 %, limits now and suggested."""
    figure, axes = _figure("What a limit of the surface check costs")
    for (name, points), colour in zip(curves.items(), (GOOD, BAD), strict=True):
        share, low, high = (100 * np.array(column) for column in zip(*points, strict=True))
        axes.plot(limits_, share, color=colour, lw=2, label=name)
        axes.fill_between(limits_, low, high, color=colour, alpha=0.15, lw=0)
    for lines, style, colour, top in ((suggested, "-", LIMIT, 99), (now, ":", GREY, 87)):
        for number, (name, value) in enumerate(lines.items()):
            axes.axvline(value, color=colour, ls=style, lw=1)
            axes.text(
                value, top - 6 * number, f" {name} {value:.3f}", color=colour, fontsize=8, va="top"
            )
    axes.set_xlabel("limit of the defect probability")
    axes.set_ylabel("% of these parts")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 100)
    axes.legend(loc="center right", frameon=False, fontsize=8)
    return _png(figure)


def stopped_against_escape(
    runs: Mapping[str, tuple[Sequence[tuple[float, float]], tuple[float, float]]],
    good: int,
    defective: int,
) -> bytes:
    """Runs over the same parts: name -> ((escape, stopped) over limits, that in use)."""
    figure, axes = _figure("Good parts stopped against defective parts passed, over all limits")
    for (name, (points, used)), colour in zip(runs.items(), (GREY, GOOD, BAD), strict=False):
        escape, stopped = (100 * np.array(column) for column in zip(*points, strict=True))
        axes.plot(escape, stopped, color=colour, lw=2, label=name)
        axes.plot([100 * used[0]], [100 * used[1]], "o", color=colour, ms=9)
    axes.set_xlabel(f"escape: defective parts below the limit, % of {defective}")
    axes.set_ylabel(f"good parts at or above it (FAIL or UNSURE), % of {good}")
    axes.set_xlim(-1, 60)
    axes.set_ylim(-1, 101)
    axes.legend(loc="upper right", frameon=False, fontsize=9, title="dots: the limits in use")
    return _png(figure)


def scores(done: Certified) -> bytes:
    """Histogram of part scores by truth, a panel a check, with both limits."""
    checks = sorted({part.check for part in done.found.parts})
    figure = Figure(figsize=(8, 2.6 * len(checks) + 0.6), layout="constrained")
    panels = figure.subplots(len(checks), 1, squeeze=False, sharex=True)[:, 0]
    edges = np.linspace(-_SHOWN, _SHOWN, 61)
    for check, axes in zip(checks, panels, strict=True):
        for defective, colour, word in ((False, GOOD, "good"), (True, BAD, "defective")):
            own = [p for p in done.found.of(defective=defective) if p.check == check]
            drawn = np.clip([p.score(done.temperatures) for p in own], -_SHOWN, _SHOWN)
            label = f"{word}, n = {len(own)}"
            axes.hist(drawn, edges, histtype="stepfilled", alpha=0.45, color=colour, label=label)
        _limit(axes, done.certificate.limit_pass, "-", "PASS below")
        if done.certificate.limit_fail is not None:
            _limit(axes, done.certificate.limit_fail, ":", "good parts stay below")
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylabel("parts")
        axes.set_title(check, loc="left")
        axes.legend(loc="upper right", frameon=False, fontsize=8)
    panels[-1].set_xlabel("part score: log-odds of defective over temperature (beyond 30: at 30)")
    return _png(figure)


def _limit(axes: Axes, value: float, style: str, label: str) -> None:
    if abs(value) < CERTAIN:
        at = float(np.clip(value, -_SHOWN, _SHOWN))
        axes.axvline(at, color=LIMIT, ls=style, label=f"{label} {value:.2f}")


def reliability(done: Certified) -> bytes:
    """Share of defective parts against the stated probability, before and after temperature."""
    checks = sorted(done.fits)
    figure = Figure(figsize=(4.2 * len(checks), 4.4), layout="constrained")
    panels = figure.subplots(1, len(checks), squeeze=False)[0]
    for check, axes in zip(checks, panels, strict=True):
        fit = done.fits[check]
        own = [part for part in done.found.parts if part.check == check and check in part.log_odds]
        axes.plot([0, 1], [0, 1], color=GREY, lw=1)
        for heat, colour, word in ((1.0, GREY, "as it is"), (fit.temperature, GOOD, "scaled")):
            _reliability_line(axes, own, check, heat, colour, word)
        title = f"{check}: T = {fit.temperature:.2f}, n = {len(own)}"
        axes.set_title(title + (" (not fitted)" if fit.note else ""), loc="left", fontsize=10)
        axes.set_xlabel("stated probability of defective")
        axes.set_ylabel("share that is defective (95 % interval)")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.legend(loc="lower right", frameon=False)
    return _png(figure)


def _reliability_line(
    axes: Axes, parts: Sequence[Part], check: str, heat: float, colour: str, word: str
) -> None:
    """Bins of equal numbers of parts, each with its exact two-sided interval."""
    pairs = sorted((part.log_odds[check] / heat, part.defective) for part in parts)
    middle, share, below, above = [], [], [], []
    for block in np.array_split(np.arange(len(pairs)), _BINS):
        if not len(block):
            continue
        own = [pairs[i] for i in block]
        hits, count = sum(truth for _, truth in own), len(own)
        odds = np.array([value for value, _ in own])
        middle.append(float(np.mean(1.0 / (1.0 + np.exp(-np.clip(odds, -700, 700))))))
        share.append(hits / count)
        above.append(binomial.upper(hits, count, 0.025) - hits / count)
        below.append(hits / count - (1.0 - binomial.upper(count - hits, count, 0.025)))
    axes.errorbar(
        middle, share, yerr=[below, above], fmt="o-", ms=4, lw=1, color=colour, label=word
    )


def pod(
    found: Mapping[str, Curve | Refused],
    data: Mapping[str, tuple[Array, NDArray[np.bool_]]],
    unit: str,
) -> bytes:
    """Curves with the hits and misses they were fitted to, a90 and a90/95."""
    names = [name for name in found if name != ALL] + [ALL]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for name, axes in zip(names, panels, strict=False):
        one, (sizes, hits) = found[name], data[name]
        jitter = np.random.default_rng(0).uniform(-0.02, 0.02, len(sizes))
        axes.scatter(sizes, hits + jitter, s=7, alpha=0.4, color=np.where(hits, GOOD, BAD))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(-0.08, 1.08)
        axes.set_title(f"{name}: {one.hits} of {one.flaws} found", loc="left", fontsize=10)
        axes.set_xlabel(f"size, {unit}")
        axes.set_ylabel("probability of detection")
        if isinstance(one, Refused):
            axes.text(0.5, 0.5, "not stated", transform=axes.transAxes, ha="center", color=BAD)
            continue
        grid = np.geomspace(sizes.min(), sizes.max(), 200)
        axes.plot(grid, one.pod(grid), color=LIMIT, lw=2)
        axes.axhline(0.9, color=GREY, lw=0.8)
        axes.axvline(one.a90, color=GOOD, ls="--", label=f"a90 {one.a90:.2f}")
        if one.a90_95 is not None:
            axes.axvline(one.a90_95, color=BAD, ls="--", label=f"a90/95 {one.a90_95:.2f}")
        axes.legend(loc="center right", frameon=False, fontsize=8)
    return _png(figure)


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    return figure, axes


def _png(figure: Figure) -> bytes:
    """No display and no global state: `Figure` draws with the backend of PNG files."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    buffer = io.BytesIO()
    with mpl.rc_context({"savefig.dpi": 110}):
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
