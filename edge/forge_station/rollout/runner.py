"""Carries a rollout out, one look at all stations after the other. It knows no broker and no clock
of its own: what stations say comes through their `Way`, and every decision is on disk before an
order leaves. Killed anywhere, it goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from forge_station.bundles.jobs import FINAL
from forge_station.errors import ConfigError
from forge_station.rollout.plan import Gates, Group, Plan
from forge_station.rollout.record import (
    ENDED,
    OVER,
    Folder,
    Phase,
    RolloutRecord,
    StationRecord,
    Step,
)
from forge_station.rollout.stick import Report
from forge_station.rollout.ways import AGAIN_S, ANSWER_S, Answer, Seen, Way

PAUSE, ABORT, APPROVED, UNSIGNED = "pause", "abort", "approved-", "unsigned-"
ANOTHER_BUNDLE = "it is about another bundle"
TAKEN_WITHIN_S = ANSWER_S + 20.0
"""An order is taken within this time after it was sent, or never: it expires."""


class Runner:
    """`step` until `record.phase` is over. `told(text, station)` is called with every news."""

    def __init__(
        self,
        folder: Folder,
        plan: Plan,
        ways: Mapping[str, Way],
        url_of: Callable[[str], str],
        *,
        told: Callable[[str, str], object] = lambda _text, _station: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._plan, self._ways, self._url_of = folder, plan, ways, url_of
        self._told, self._clock = told, clock
        self._members = plan.members()
        self._groups = {group.name: group for group in plan.groups}
        self.record = folder.read()
        self._require_its_plan()
        self.seen: dict[str, Seen] = {}
        self._doubts: dict[str, str] = {}  # told of a station; anew in each process
        self.waits_for = ""
        """The person, stick or time that it waits for; empty: stations alone."""

    def _require_its_plan(self) -> None:
        planned = {name: group for group, names in self._members.items() for name in names}
        noted = {item.name: item.group for item in self.record.stations}
        if planned != noted or self.record.group >= len(self._plan.groups):
            raise ConfigError(
                "the plan of the rollout was changed after it began",
                which=self._folder.plan,
                expected="the stations and groups of state.json beside it",
                action="put it back as it was; the plan outside the folder may change",
            )

    @property
    def paused(self) -> bool:
        return self._folder.asked(PAUSE) is not None

    @property
    def busy(self) -> bool:
        """Whether a station with a network is at it."""
        steps = ("ORDERED", "UNDER_WAY", "TAKING_BACK")
        return any(s.step in steps and not self._is_stick(s) for s in self.record.stations)

    def step(self) -> None:
        """Look at every station once and do what follows. Raises ConfigError when it cannot be
        noted; then nothing was done."""
        if self.record.phase in OVER:
            return
        self.waits_for = ""
        for item in self.record.stations:
            self._look(item)
        self._obey()
        if self.record.phase == "RUNNING":
            self._stop_if_exceeded()
        for item in self.record.stations:
            if item.step == "TAKING_BACK":
                self._take_back(item)
        if self.record.phase == "RUNNING":
            self._go_on()
        else:
            self._go_back()

    # What is on disk

    def _write(self, **changes: Any) -> None:
        self.record = replace(self.record, **changes)
        self._folder.write(self.record)

    def _set(self, item: StationRecord, text: str = "", **changes: Any) -> StationRecord:
        told = {key: _shown(value) for key, value in changes.items() if isinstance(value, str)}
        changed = replace(item, **{**changes, **told})
        if changed != item:
            self.record = self.record.with_station(changed)
            self._folder.write(self.record)
        if text:
            self._tell(_shown(text), item.name)
        return changed

    def _tell(self, text: str, station: str = "") -> None:
        self._folder.log(text, station)
        self._told(text, station)

    # One station

    def _look(self, item: StationRecord) -> None:
        seen = self.seen[item.name] = self._ways[item.name].look()
        if item.step in ("ORDERED", "UNDER_WAY", "FAILED", "TAKING_BACK"):
            item = self._heard(item, seen)
        if item.step == "UNDER_WAY" and item.state in FINAL:
            if item.state == "SUCCEEDED":
                self._end_well(item)
            else:
                self._fail(item, item.code or item.state, item.detail)
        elif item.step in ("ORDERED", "UNDER_WAY"):
            late_s = self._clock() - item.begun
            if late_s > self._gates(item).timeout_s:
                where = item.state or "the order has not arrived"
                self._fail(item, "TOO_LATE", f"not done after {late_s:.0f} s: {where}")
        elif item.step == "DONE" and seen.running not in ("", item.release.sha256):
            text = f"it runs another bundle meanwhile ({seen.running[:12]}...)"
            self._fail(item, "NOT_KEPT", text)

    def _heard(self, item: StationRecord, seen: Seen) -> StationRecord:
        """Take over what the station says of its deployment, or of the way back."""
        going_back = item.step == "TAKING_BACK" and item.back_job in seen.jobs
        message, doubt = self._word(item, seen)
        if going_back:
            message = seen.jobs[item.back_job]
        if message is None:
            told = self._doubts.get(item.name, "")
            self._doubts[item.name] = doubt
            if item.step not in ("ORDERED", "UNDER_WAY") or doubt in ("", told):
                return item
            text = f"its report does not count: {doubt}"
            return self._set(item, text, detail=text)
        changes: dict[str, Any] = {
            "state": str(message["state"]),
            "progress": message.get("progress"),
            "detail": str(message.get("detail", "")),
            "code": str(message.get("code", "")),
        }
        if item.failed:  # why it failed stays
            changes = {"state": changes["state"], "progress": changes["progress"]}
        vouched = ""
        if not going_back:
            report = seen.doubted.get(item.job)
            digest = "" if report is None else report.digest
            if digest not in ("", item.unsigned_report):
                asked = self._folder.asked(UNSIGNED + item.name) or {}
                vouched = f"  (report {digest[:16]}... counts unsigned: {asked.get('by')} asked)"
            changes.update(
                version=message["version"], taken=True,
                unsigned=report is not None, unsigned_report=digest,
            )  # fmt: skip
            for name, keys in (
                ("shadow", ("parts", "different")),
                ("trial", ("parts", "fail", "unsure", "slow")),
            ):
                if name in message:
                    changes[name] = tuple(int(message[name][key]) for key in keys)
        if item.step == "ORDERED":
            changes["step"] = "UNDER_WAY"
        news = changes["state"] != item.state
        end = ": ".join(changes[key] for key in ("code", "detail") if changes.get(key))
        text = f"{changes['state']}  {end}".rstrip() + vouched if news or vouched else ""
        changed = self._set(item, text, **changes)
        if vouched:  # it was for this one
            self._folder.forget(UNSIGNED + item.name)
        return changed

    def _word(self, item: StationRecord, seen: Seen) -> tuple[Mapping[str, Any] | None, str]:
        """What the station says of its deployment, and why a report on its stick does not count."""
        message, report = seen.jobs.get(item.job), seen.doubted.get(item.job)
        if message is None and report is not None:
            asked = self._folder.asked(UNSIGNED + item.name) or {}
            vouched = report.digest in (item.unsigned_report, asked.get("report"))
            doubt = doubt_of(item, report, vouched)
            return (None, doubt) if doubt else (report.message, "")
        if message is not None and _of_another(message, item):
            return None, ANOTHER_BUNDLE
        return message, ""

    def _end_well(self, item: StationRecord) -> None:
        """SUCCEEDED, by the station's own rules: now by those of the plan."""
        gates, over = self._gates(item), []
        for counted, at, limit, what in (
            (item.shadow, 1, gates.shadow_disagree, "judged differently in SHADOW"),
            (item.trial, 1, gates.trial_fail, "FAIL in TRIAL"),
            (item.trial, 2, gates.trial_unsure, "UNSURE or ERROR in TRIAL"),
        ):
            if counted and counted[at] > limit * counted[0]:
                over.append(
                    f"{counted[at]} of {counted[0]} parts {what}, the gate is {100 * limit:g} %"
                )
        if over:
            self._fail(item, "GATE", "; ".join(over))
        else:
            self._set(item, step="DONE", progress=None)

    def _fail(self, item: StationRecord, code: str, detail: str) -> None:
        changes = {"failed": True, "code": code, "detail": detail, "progress": None}
        own_end = item.state in FINAL and item.state != "SUCCEEDED"
        if own_end or code == "NOT_KEPT":  # the bundle is not there any more
            self._set(item, f"failed  {code}: {detail}", step="FAILED", **changes)
        else:
            self._begin_back(self._set(item, f"failed  {code}: {detail}", **changes))

    def _gates(self, item: StationRecord) -> Gates:
        return self._groups[item.group].gates

    # Forward

    def _go_on(self) -> None:
        record, group = self.record, self._plan.groups[self.record.group]
        members = [record.station(name) for name in self._members[group.name]]
        if self.paused:
            self.waits_for = "resume (it is paused)"
            return
        self._deliver(members)
        self._stop_if_exceeded()  # one may have refused the order
        if self.record.phase != "RUNNING":
            return
        members = [self.record.station(name) for name in self._members[group.name]]
        left = [item for item in members if item.step not in ("DONE", "FAILED", "BACK")]
        if left:
            if all(self._is_stick(item) for item in left):
                names = ", ".join(item.name for item in left)
                doubted = [item.name for item in left if self._word(item, self.seen[item.name])[1]]
                more = f" (no report that counts from {', '.join(doubted)})" if doubted else ""
                self.waits_for = f"the stick of {names}{more}"
            return
        now = self._clock()
        if not record.group_done:
            self._write(group_done=now)
            self._tell(f"group {group.name} is done")
        if record.group + 1 == len(self._plan.groups) and not group.gates.wait_s:
            self._end("SUCCEEDED", "")
            return
        wait = wait_of(self.record, group, now)
        if wait:
            self.waits_for = wait
        elif record.group + 1 == len(self._plan.groups):
            self._end("SUCCEEDED", "")
        elif group.gates.approval and self._folder.asked(APPROVED + group.name) is None:
            self.waits_for = f"approval of group {group.name} (forge-station rollout approve)"
        else:
            following = self._plan.groups[record.group + 1]
            self._write(group=record.group + 1, group_done=0.0)
            self._tell(f"group {following.name} begins")

    def _deliver(self, members: list[StationRecord]) -> None:
        """Give the order to who waits for it, and again to who has not answered."""
        busy = sum(
            item.step in ("ORDERED", "UNDER_WAY") and not self._is_stick(item)
            for item in self.record.stations
        )
        for item in members:
            seen = self.seen[item.name]
            if item.step == "WAITING":
                if busy >= self._plan.at_once:
                    continue
                busy += not self._is_stick(item)
                item = self._set(item, "order", step="ORDERED", begun=self._clock())
            if item.step == "ORDERED" and not item.accepted:
                self._order(item, seen)

    def _order(self, item: StationRecord, seen: Seen) -> None:
        stick = self._is_stick(item)
        if not stick and not (seen.online and seen.born):
            never = "" if seen.online is False else "nothing is known of it at its broker"
            self._set(item, detail=seen.trouble or never or "it is offline")
            return
        if not item.sent and seen.running == item.release.sha256:
            text = "runs this bundle already"
            self._set(item, text, step="DONE", state="SUCCEEDED", detail=text)
            return
        if not stick:
            if self._clock() - item.sent < AGAIN_S:
                return
            item = self._set(item, sent=self._clock())
        answer = self._ways[item.name].deploy(
            item, self._url_of(item.name), self._plan.allow_downgrade
        )
        if answer.taken:
            text = answer.detail if stick else ""
            self._set(item, text, accepted=True, taken=not stick, detail=answer.detail)
        elif answer.later:
            self._set(item, detail=answer.detail)
        else:
            self._set(
                item, f"refused the order  {answer.code}: {answer.detail}",
                step="FAILED", state="REFUSED", failed=True,
                code=answer.code or "REFUSED", detail=answer.detail,
            )  # fmt: skip

    def _is_stick(self, item: StationRecord) -> bool:
        return any(s.name == item.name and s.stick is not None for s in self._plan.stations)

    # Back

    def _stop_if_exceeded(self) -> None:
        for group in self._plan.groups[: self.record.group + 1]:
            members = [self.record.station(name) for name in self._members[group.name]]
            failed = [item for item in members if item.failed]
            if not failed or len(failed) <= group.gates.max_failed * len(members):
                continue
            names = ", ".join(item.name for item in failed)
            why = (
                f"{len(failed)} of {len(members)} stations of group {group.name} failed ({names}), "
                f"the limit is {100 * group.gates.max_failed:g} %"
            )
            back = self._plan.when_exceeded == "roll_back"
            self._turn("ROLLED_BACK" if back else "STOPPED", why, back)
            return

    def _turn(self, ends_as: Phase, why: str, done_too: bool) -> None:
        """No more orders; what is under way goes back, and with `done_too` what is done as well."""
        steps: set[Step] = set() if ends_as == "STOPPED" else {"ORDERED", "UNDER_WAY"}
        steps |= {"DONE"} if done_too else set()
        back = [item for item in self.record.stations if item.step in steps]
        for item in back:
            self.record = self.record.with_station(self._on_its_way_back(item))
        self._write(phase="TAKING_BACK", ends_as=ends_as, why=why)  # all of it, or nothing
        self._tell(f"no further station: {why}")
        for item in back:
            self._tell("is to go back to the bundle before", item.name)

    def _begin_back(self, item: StationRecord) -> None:
        self._write(stations=self.record.with_station(self._on_its_way_back(item)).stations)
        self._tell("is to go back to the bundle before", item.name)

    def _on_its_way_back(self, item: StationRecord) -> StationRecord:
        return replace(
            item,
            step="TAKING_BACK",
            begun=self._clock(),
            sent=0.0 if item.taken else item.sent,
            accepted=False,
            progress=None,
        )

    def _obey(self) -> None:
        asked = self._folder.asked(ABORT)
        if asked is not None and self.record.phase == "RUNNING":
            by = f" by {asked['by']}" if asked.get("by") else ""
            self._turn("ABORTED", f"aborted{by}", bool(asked.get("back")))

    def _go_back(self) -> None:
        if self.record.ends_as == "STOPPED":  # what is under way comes to its own end
            self._deliver([item for item in self.record.stations if item.step == "ORDERED"])
        if all(item.step in ENDED for item in self.record.stations):
            self._end(self.record.ends_as, self.record.why)

    def _take_back(self, item: StationRecord) -> None:
        seen, now = self.seen[item.name], self._clock()
        message, _ = self._word(item, seen)
        state = str(message["state"]) if message is not None else ""
        back = seen.jobs.get(item.back_job)
        if back is not None and back["state"] in FINAL:
            gone = back["state"] == "ROLLED_BACK"
            self._went_back(item, gone, str(back.get("detail", "")))
        elif state in FINAL and state != "SUCCEEDED":
            self._went_back(item, True, "")
        elif (
            state == "SUCCEEDED" and back is None and seen.running not in ("", item.release.sha256)
        ):
            self._went_back(item, True, "it runs another bundle, which was left alone")
        elif message is None and not (item.taken or item.sent or self._is_stick(item)):
            self._went_back(item, True, "the order was never sent")
        elif now - item.begun > self._gates(item).timeout_s:
            self._went_back(item, False, "it did not answer in time; look at the station")
        elif message is None and not item.taken:
            self._was_never_taken(item, seen, now)
        elif not item.accepted and back is None and now - item.sent >= AGAIN_S:
            if not self._is_stick(item) and not seen.online:
                self._set(item, **({} if item.failed else {"detail": "offline, to go back"}))
                return
            item = self._set(item, sent=now)
            job = item.back_job if state == "SUCCEEDED" else item.job
            self._asked_back(item, self._ways[item.name].take_back(item, job), job)

    def _was_never_taken(self, item: StationRecord, seen: Seen, now: float) -> None:
        """The station says nothing of the deployment. A `rollback` of an unknown id would take
        away the bundle before: it is not sent."""
        if self._is_stick(item):
            answer = self._ways[item.name].take_back(item, item.job)
            if not answer.later:
                self._went_back(item, answer.taken, answer.detail)
            self.waits_for = f"the stick of {item.name}"
        elif seen.online and now - item.sent > TAKEN_WITHIN_S:
            self._went_back(item, True, "the order was never taken")

    def _asked_back(self, item: StationRecord, answer: Answer, job: str) -> None:
        if answer.taken or answer.later:
            self._set(item, accepted=answer.taken and job == item.back_job)
        else:
            self._went_back(item, False, f"{answer.code}: {answer.detail}")

    def _went_back(self, item: StationRecord, gone: bool, detail: str) -> None:
        kept = {} if item.failed and item.detail else {"detail": detail}
        if gone:
            self._set(item, f"is back  {detail}".rstrip(), step="BACK", progress=None, **kept)
        else:
            text = f"did not go back: {detail}"
            self._set(
                item, text, step="FAILED", failed=True, code="NOT_BACK", detail=detail,
                progress=None,
            )  # fmt: skip

    def _end(self, phase: Phase, why: str) -> None:
        self._write(phase=phase, why=why, ended=self._clock())
        self._tell(f"{phase}  {why}".rstrip())


def doubt_of(item: StationRecord, report: Report, vouched: bool) -> str:
    """Why a report on a station's stick does not count; empty: it does. `vouched`: a person asked
    that this one counts though nobody signed it."""
    if report.forged:
        return report.doubt
    if _of_another(report.message, item):
        return ANOTHER_BUNDLE
    if report.doubt and not vouched:
        return f"{report.doubt} (rollout resume --unsigned {item.name})"
    return ""


def _of_another(message: Mapping[str, Any], item: StationRecord) -> bool:
    return bool(message.get("sha256", item.release.sha256) != item.release.sha256)


def wait_of(found: RolloutRecord, group: Group, now: float) -> str:
    """What is left of the time that a group must have been done, for people; empty: nothing."""
    ends = found.group_done + group.gates.wait_s
    if not found.group_done or ends <= now:
        return ""
    until = datetime.fromtimestamp(ends).astimezone().isoformat(" ", "seconds")
    return f"gates.wait_s of group {group.name}, until {until} ({ends - now:.0f} s)"


def _shown(text: str) -> str:
    """What a station says goes to a file and to a terminal, which control characters would lead."""
    return "".join(c if c.isprintable() else "?" for c in text)
