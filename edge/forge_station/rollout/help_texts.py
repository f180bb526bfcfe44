"""What `forge-station rollout --help` says, and the help of each of its actions."""

from __future__ import annotations

from collections.abc import Mapping

DESCRIPTION = """\
Bring a bundle to many stations, group by group: each station tries it out (self-test, shadow,
trial) and keeps it or goes back by itself; this command gives the orders, watches, and stops or
takes the bundle back when more stations fail than the plan allows. No server: what was done is in
a folder beside the plan (PLAN without its ending, .rollout), what stations say is at their broker.

on the engineer's machine
  check PLAN               read the plan, look at every station, order nothing
  start PLAN --key KEY     begin, and stay until the end; Ctrl-C is no harm
  resume PLAN --key KEY    go on: after a pause, after Ctrl-C, after a power cut
  status PLAN              where every station is
  pause PLAN               no further orders; stations that are at it go on
  approve PLAN GROUP       let the group after GROUP begin (gates: approval)
  abort PLAN               end it: who is under way goes back; --back: who is done as well

at a station without a network
  apply FOLDER             take what the stick brings, and put the result on it
"""
PLAN_EXAMPLE = """\
a plan
  name: washers-7
  bundle: washers-7.fsb                # forge-station bundle sign, then pack
  serve: http://10.20.0.7:8900         # this machine, as stations see it
                                       # or url: https://files.plant/{file}
  mqtt: {host: broker.plant, port: 8883, tls: true, enterprise: acme, site: berlin, line: washers}
  stations:
    - {name: l3}                       # topics of mqtt, with its name as the last level
    - {name: l4}
    - {name: l5, file: l5.yaml}        # or as its station file says
    - {name: l6, stick: /media/stick, key: l6.pub.pem}    # no network; l6 signs its report
  groups:
    - {name: canary, stations: [l3], gates: {wait_s: 3600, approval: true}}
    - {name: quarter, share: 0.25}     # with the groups before it
    - {name: all, share: 1}
  gates: {max_failed: 0, shadow_disagree: 0.02, trial_unsure: 0.1, timeout_s: 28800}

exit codes: 0 done everywhere; 1 ended otherwise (or refused); 2 not at its end yet; 64 wrong usage
Every key, and what happens when: docs/ROLLOUT.md. The last line with --json is one JSON object.
"""

ACTIONS: Mapping[str, tuple[str, str]] = {
    "check": (
        "look at plan and stations, order nothing",
        """\
Read the plan, verify its bundle files, and look at every station with a broker: is it there, what
does it run, does it take deployments. Nothing is written, no order is given.

examples
  forge-station rollout check washers-7.yaml
  forge-station rollout check washers-7.yaml --tls-cert me.crt --tls-key me.key    with access rules

exit codes: 0 every station is ready or has a stick, 1 one is not, 64 wrong usage or plan""",
    ),
    "start": (
        "begin a rollout and carry it out",
        """\
Begin the rollout of PLAN: give the orders group by group, watch, and stay until the end. Ctrl-C is
no harm: stations go on with what they have, and `resume` goes on from there. It is begun once; for
another try name another folder (--state). Refused while a stick has an order of another rollout for
the same station that is not over.

examples
  forge-station rollout start washers-7.yaml --key engineer.pem
  forge-station rollout start sticks.yaml --key engineer.pem --no-wait     orders onto the sticks

exit codes: 0 done everywhere, 1 ended otherwise, 2 not at its end yet, 64 wrong usage or plan""",
    ),
    "resume": (
        "go on with a rollout",
        """\
Go on with a rollout after a pause, Ctrl-C, a power cut, or when a stick is back: find out what
happened meanwhile, and carry it out to its end. Where another process does that already, only the
pause ends. A report on a stick that the station's key did not sign does not count, and why is said
each time; --unsigned lets the one that lies there now count, for which you vouch.

examples
  forge-station rollout resume washers-7.yaml --key engineer.pem
  forge-station rollout resume washers-7.yaml --key engineer.pem --no-wait       a stick is back
  forge-station rollout resume washers-7.yaml --key engineer.pem --unsigned l6   its report as well

exit codes: 0 done everywhere, 1 ended otherwise, 2 not at its end yet, 64 wrong usage or report""",
    ),
    "status": (
        "where every station is",
        """\
Print where every station is, as the process that carries the rollout out has noted it, and why a
report that lies on a stick does not count. It reaches no station and changes nothing.

examples
  forge-station rollout status washers-7.yaml
  forge-station rollout status washers-7.yaml --json

exit codes: 0 done everywhere, 1 ended otherwise, 2 not at its end yet, 64 wrong usage""",
    ),
    "pause": (
        "no further orders",
        """\
Give no further orders; stations that are at it come to their own end. From any shell, while another
process carries the rollout out or none does. `resume` goes on.

example
  forge-station rollout pause washers-7.yaml

exit codes: 0 asked for, 1 it is over, 64 wrong usage""",
    ),
    "approve": (
        "let the next group begin",
        """\
Let the group after GROUP begin (gates: approval), once GROUP is done and has been so for its
wait_s. From any shell; the log says who.

examples
  forge-station rollout approve washers-7.yaml canary
  forge-station rollout approve washers-7.yaml canary --by anna

exit codes: 0 approved, 1 the rollout is over, 64 wrong usage or no such group""",
    ),
    "abort": (
        "end it; who is under way goes back",
        """\
End the rollout: no further orders, and stations under way go back to their bundle before. With
--back those that are done as well. While another process carries the rollout out it is asked to,
and needs no key of you. Where none does (after Ctrl-C, --no-wait or a power cut) this command gives
the orders itself: name --key then, the one that the rollout was started with. An order that no
station took is taken off its stick; on a station without a network a bundle goes back by hand.

examples
  forge-station rollout abort washers-7.yaml                              while `start` runs
  forge-station rollout abort washers-7.yaml --key engineer.pem --back    no process is at it

exit codes: 0 asked for, 1 aborted, or it was over; 2 not at its end yet, 64 wrong usage or key""",
    ),
    "apply": (
        "at a station: take what a stick brings",
        """\
At a station without a network, beside the running station or while it stands: verify the bundle on
the stick into its store and leave the deployment there. The running station takes it up within
seconds, one that stands at its next start, and tries it out. This command waits for the end and
puts the result on the stick, signed with release.report_key. Run it as the station's user. Run
again it goes on where it was.

examples
  forge-station rollout apply /media/stick --station /etc/forge-station/station.yaml
  forge-station rollout apply /media/stick --no-wait       how far it is now; run it again later

exit codes: 0 kept, 1 not kept (or refused), 2 not at its end yet, 64 wrong usage or stick""",
    ),
}
"""Action -> one line, and the description; its last paragraph comes last, behind the options."""
