"""The command `forge-station audit`: what labels prove of escapes and overkill, and do not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from forge_station.assurance import audit, ledger, looks, report, study_files
from forge_station.assurance.agreement import Rate
from forge_station.assurance.audit import Alarm, Ledger, Span
from forge_station.assurance.error import AssuranceError
from forge_station.checks import SCORE_VERSION
from forge_station.contract import binomial, record
from forge_station.contract import certificate as contract_certificate
from forge_station.contract.certificate import CERTIFICATE_NAME
from forge_station.contract.error import StationError
from forge_station.contract.label import Label
from forge_station.vlm.bundle_files import read_manifest

OK, ALARM, REFUSED = 0, 1, 2
_TEACH = """\
Count what a line let through and what it stopped in vain, from stored verdicts and the labels that
people gave, one ledger a line and bundle, with exact 95 % intervals.

A labels file has one JSON object a line, as for training.load evidence, and tells how the part was
chosen, since that decides what its label proves:
  {"result_id": "01a2...", "label": "NG", "reviewer": "anna", "blind": true,
   "more": {"origin": "audit"}}
origin: audit (drawn at random from PASS), manual (every part of a time window), challenge (known
fault), returns. Stopped parts that name none are `harvested`: they tell of false calls, never of
escapes. Only blind labels count; cannot_tell and labels that disagree do not, nor does what tested
a reviewer on a part of known truth (more.gold).

The alarms may be looked at after every label: they are sound at any time (false alarm at most
--risk). A claim (--claim) is a look at the parts: each further one on the same parts may risk less,
so looks are kept in a ledger (--looks), and one that cannot succeed is refused."""
_CODES = """\
exit codes: 0 nothing to object, 1 an alarm is raised, 2 something was refused (see `refused`),
64 wrong usage or input. The last line of the output is one JSON object. docs/QUALITY.md"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of `forge-station audit`."""
    command.description, command.epilog = _TEACH, _CODES
    command.add_argument("evidence", type=Path, metavar="FOLDER", help="evidence of the station")
    command.add_argument("--labels", type=Path, nargs="+", required=True, metavar="FILE.jsonl")
    command.add_argument(
        "--origin", choices=sorted(audit.ORIGINS), help="of labels on PASS parts that name none"
    )
    command.add_argument(
        "--escape-limit", type=_share, default=0.01, metavar="P",
        help="alarm when more of the defective parts pass (default 0.01)",
    )  # fmt: skip
    command.add_argument(
        "--outgoing-limit", type=_share, default=0.01, metavar="P",
        help="alarm when more of the audited PASS parts are defective (default 0.01)",
    )  # fmt: skip
    command.add_argument("--risk", type=_share, default=0.05, metavar="P", help="default 0.05")
    command.add_argument(
        "--bundle", type=Path, metavar="FOLDER", help="whose certificate is held against the parts"
    )
    command.add_argument(
        "--claim", type=_share, metavar="P", help="prove that at most so many defects escape"
    )
    command.add_argument(
        "--looks", type=Path, metavar="FILE", help="with --claim: ledger of looks at these parts"
    )
    command.add_argument("--out", type=Path, metavar="FILE.json", help="write the ledgers there")
    command.add_argument(
        "--every", type=_days, metavar="DAYS",
        help="the ledgers over time as well, by windows of so many days",
    )  # fmt: skip
    command.add_argument(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="with --every: charts over bundles and time",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the ledgers; the exit code, see the help."""
    if (args.claim is None) != (args.looks is None):
        raise AssuranceError(
            "a claim needs its ledger of looks", expected="--claim and --looks together"
        )
    if args.report is not None and args.every is None:
        raise AssuranceError("a report over time needs its windows", expected="--every DAYS")
    labels = [label for path in args.labels for label in read_labels(path)]
    print(f"reading the verdicts below {args.evidence}", file=sys.stderr)
    verdicts = study_files.verdicts_below(args.evidence)
    if not verdicts:
        raise AssuranceError("no verdict", which=args.evidence, expected="*.verdict.json")
    found = audit.ledgers(
        verdicts,
        labels,
        origin=args.origin,
        escape_limit=args.escape_limit,
        outgoing_limit=args.outgoing_limit,
        delta=args.risk,
    )
    refused = {f"{own.line}: {what}": why for own in found for what, why in own.refused.items()}
    for own in found:
        print("\n".join(lines(own)))
    if args.bundle is not None:
        why = certificate_refusal(args.bundle, [own.model for own in found if own.labelled])
        if why is not None:
            refused["certificate"] = why
    told: dict[str, Any] = {"ledgers": [facts(own) for own in found]}
    if args.claim is not None:
        claim = prove(found, args.claim, args.risk, args.looks)
        told["claim"] = claim
        if claim["refused"] is not None:
            refused["claim"] = claim["refused"]
        print(f"claim, escape <= {100 * args.claim:g} %: {claim['text']}")
    if args.every is not None:
        windows = ledger.entries(verdicts, labels, args.every, origin=args.origin)
        told["windows"] = [ledger.facts(entry) for entry in windows]
        if args.report is not None:
            report.put(args.report, ledger.page(windows, str(args.evidence)))
    told["refused"] = refused
    for what, why in refused.items():
        print(f"REFUSED {what}: {why}")
    if args.out is not None:
        report.put(args.out, json.dumps(told, indent=1) + "\n")
    print(json.dumps(told))
    raised = any(alarm.raised_at for own in found for alarm in own.alarms)
    return ALARM if raised else REFUSED if refused else OK


def read_labels(path: Path) -> list[Label]:
    """All labels of a file. Raises AssuranceError with the line at fault."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise AssuranceError("labels cannot be read", which=path, got=error) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        which = f"{path}, line {number}"
        try:
            label = record.read(Label, json.loads(line))
        except (ValueError, RecursionError) as error:
            text = " ".join(str(error).split())
            raise AssuranceError("not a label", which=which, got=text) from error
        origin = label.more.get("origin", "manual")
        if origin not in audit.ORIGINS:
            raise AssuranceError(
                "unknown origin", which=which, expected=", ".join(audit.ORIGINS), got=origin
            )
        found.append(label)
    return found


def certificate_refusal(bundle: Path, models: Sequence[str]) -> str | None:
    """Why the bundle's certificate says nothing of parts that `models` judged; None: it holds.

    Its signature is not checked here: the station does, before it says PASS.
    """
    try:
        manifest = read_manifest(bundle)
        content = (bundle / CERTIFICATE_NAME).read_bytes()
        signed = contract_certificate.parse(content)
    except OSError as error:
        return f"{CERTIFICATE_NAME} cannot be read: {error.strerror}"
    except StationError as error:
        return " ".join(str(error).split())
    objections = list(
        contract_certificate.objections(
            signed.certificate,
            model_sha256=manifest.model_sha256,
            score_version=SCORE_VERSION,
            now=datetime.now(timezone.utc),
        )
    )
    others = sorted({model[:12] for model in models if model != manifest.sha256})
    if others:
        objections.append(
            f"labelled parts were judged by another bundle ({', '.join(others)}..., this one is "
            f"{manifest.sha256[:12]}...): their escapes and its certificate do not belong together"
        )
    return "; ".join(objections) or None


def prove(found: Sequence[Ledger], rate: float, delta: float, path: Path) -> dict[str, Any]:
    """A look at the defective parts of the newest bundle that has any; it is in the ledger of looks
    before the result is told."""
    own = next((item for item in reversed(found) if item.defective), None)
    if own is None:
        why = next((text for item in found for text in item.refused.values()), None)
        why = why or "no defective part of an unselected origin is labelled"
        return {"refused": why, "text": "refused", "look": None, "proved": False}
    names = looks.names(own.defective)
    events = sum(own.defective.values())
    key = looks.key([own.model, f"{rate:g} {delta:g}", *sorted(map(str, own.defective.items()))])
    look = looks.number(looks.read(path), key, names)
    why = looks.refusal(len(names), rate, delta, look)
    if why is not None:
        return {"refused": why, "text": "refused", "look": look, "proved": False}
    stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    looks.append(path, looks.Look(look, key, stamp, own.bundle, f"audit {rate:g}", names))
    upper = binomial.upper(events, len(names), binomial.look_delta(delta, look))
    proved = upper <= rate
    text = (
        f"{'proved' if proved else 'not proved'}: {events} of {len(names)} defective parts "
        f"escaped, at most {100 * upper:.2f} % (look {look})"
    )
    return {"refused": None, "text": text, "look": look, "proved": proved, "upper": upper}


def lines(own: Ledger) -> list[str]:
    """One ledger for a terminal."""
    seen = ", ".join(f"{count} {name}" for name, count in own.seen.items())
    out = [f"line {own.line or '-'}, bundle {own.bundle or '-'} ({own.model[:12]}): {seen}"]
    origins = ", ".join(f"{count} {name}" for name, count in own.labelled.items())
    out.append(f"  labelled parts                  {origins or 'none'}")
    if own.left_out:
        text = ", ".join(f"{count} {name}" for name, count in own.left_out.items())
        out.append(f"  labels that do not count        {text}")
    named: list[tuple[str, Mapping[str, Rate]]] = [
        ("escape P(PASS|defective)", own.escape),
        ("overkill P(FAIL|good)", own.overkill),
        ("unsure P(UNSURE|good)", own.unsure),
        ("outgoing P(defective|PASS)", {"audit": own.outgoing} if own.outgoing else {}),
        ("false calls P(good|FAIL)", {"reviewed": own.false_calls} if own.false_calls else {}),
    ]
    for text, rates in named:
        out += [f"  {text:<28}  {origin:<9} {report.rate(rate)}" for origin, rate in rates.items()]
    for text, span in (("escape", own.line_escape), ("overkill", own.line_overkill)):
        if span is not None:
            out.append(f"  {text + ' of the line':<28}  combined  {_span(span)}")
    return out + [f"  {_alarm(alarm)}" for alarm in own.alarms]


def _span(span: Span) -> str:
    return f"{100 * span.share:.2f} % ({100 * span.low:.2f} to {100 * span.high:.2f} %)"


def _alarm(alarm: Alarm) -> str:
    head = f"{alarm.what} > {100 * alarm.limit:g} %"
    if alarm.raised_at is None:
        return f"no alarm: {head} is not shown ({alarm.events} of {alarm.parts} labels)"
    return f"ALARM {head}, after {alarm.raised_at} labels ({alarm.events} of {alarm.parts})"


def facts(own: Ledger) -> dict[str, Any]:
    """The ledger as plain data, rates with their intervals."""
    told = asdict(own)
    del told["defective"]
    for name in ("escape", "overkill", "unsure"):
        told[name] = {origin: _facts(rate) for origin, rate in getattr(own, name).items()}
    for name in ("outgoing", "false_calls"):
        rate = getattr(own, name)
        told[name] = None if rate is None else _facts(rate)
    for alarm in told["alarms"]:
        if alarm["log_evidence"] == float("-inf"):
            alarm["log_evidence"] = None
    return told


def _facts(rate: Rate) -> dict[str, Any]:
    low, high = rate.interval
    return {"count": rate.count, "of": rate.of, "share": rate.share, "low": low, "high": high}


def _days(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("whole days, 1 or more")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError("a share between 0 and 1, such as 0.01")
    return value
