"""A new product line: from its line file to a bundle on three stations, by groups, and back.

    python examples/new_line/new_line.py --out out/new_line

Stations, scanners and parts are simulated; all else is what a plant uses, and every command is
printed before it runs. It takes about two minutes of CPU and six of time. No checkpoint and no
torch: the parts are in the catalogue that the demo's model knows, so the line needs a line file, a
golden set and a release. (A line whose parts the model reads badly is trained first; give its
bundle folder as --bundle, and --certificate-key.)

1. keys: whose bundles count, and whose orders
2. golden scans of the new parts; release 1 from the demo's bundle; signed, packed
3. three stations get release 1 by hand and start; `forge-station listen` is the MES of each
4. release 2 goes out by groups: station-1, then both others
5. release 3 is bad: somebody set the size tolerance to a hundredth. station-3, the canary, takes it
   back by itself; nobody else is asked

It fails when one of these does not happen. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STATIONS = {
    "station-1": "CLAMP-SET-M12", "station-2": "T-BOLT-M12-3", "station-3": "CAP-NUT-M10-4",
}  # fmt: skip
STATES = (
    "QUEUED", "DOWNLOADING", "VERIFYING", "STAGED", "SELF_TEST", "SHADOW", "ACTIVATING", "TRIAL",
)  # fmt: skip
START_S = 300.0


class Failed(Exception):
    """Something did not happen as it should."""


class Shop:
    """The folder of the run, and the commands in it."""

    def __init__(self, out: Path, python: str) -> None:
        self.out, self._python = out, python

    def forge(self, *words: str, wanted: int = 0) -> str:
        """`forge-station ...`, printed and waited for; its output."""
        return self._run(
            ["-m", "forge_station.cli", *words], f"forge-station {shlex.join(words)}", wanted
        )

    def tool(self, module: str, *words: str) -> str:
        """`python -m module ...`."""
        return self._run(["-m", module, *words], f"python -m {module} {shlex.join(words)}", 0)

    def background(self, stack: ExitStack, log: str, *words: str) -> subprocess.Popen[bytes]:
        """`forge-station ... > log &`, ended with the stack."""
        print(f"$ forge-station {shlex.join(words)} > {log} &", flush=True)
        with (self.out / log).open("wb") as file:
            process = subprocess.Popen(
                [self._python, "-m", "forge_station.cli", *words],
                cwd=self.out, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip

        def end() -> None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        stack.callback(end)
        return process

    def _run(self, words: list[str], shown: str, wanted: int) -> str:
        print(f"$ {shown}", flush=True)
        begun = time.monotonic()
        process = subprocess.Popen(
            [self._python, *words], cwd=self.out, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not re.search(r"\d+%\|", line):  # a progress bar
                print(f"  {line}", end="", flush=True)
        code = process.wait()
        print(f"  ({time.monotonic() - begun:.0f} s)", flush=True)
        if code != wanted:
            raise Failed(f"exit code {code}, expected {wanted}: {shown}")
        return "".join(lines)


def keys(shop: Shop) -> None:
    print("\n== 1. keys")
    shop.forge("bundle", "keygen", "release")
    shop.forge("bundle", "keygen", "engineer")


def bundles(shop: Shop, base: Path) -> None:
    print("\n== 2. bundles")
    families = "strap_clamp,step_block,hex_nut,t_slot_bolt,cap_nut"
    for task in ("assembly", "workpiece"):
        shop.tool(
            "training.cases", "--out", "golden", "--task", task, "--count", "3",
            "--seed", "20270101", "--workpieces", families,
        )  # fmt: skip
    (shop.out / "wrong.json").write_text('{"size_tolerance": 0.01}')
    for release, more in ((1, ()), (2, ()), (3, ("--thresholds", "wrong.json"))):
        name = f"clamping-{release}"
        shop.tool(
            "export.reline", "--bundle", str(base), "--line", "line.yaml", "--out", name,
            "--name", "clamping", "--version", f"0.{release}.0", "--release", str(release),
            "--golden", "golden", "--golden-count", "6", *more,
        )  # fmt: skip
        shop.forge("bundle", "sign", name, "--key", "release.pem")
        shop.forge("bundle", "pack", name, "--out", f"{name}.fsb")


def stations(shop: Shop, takt_s: float) -> dict[str, dict[str, Any]]:
    """Station files; each station has a broker of its own, as on three machines."""
    found = {}
    for number, (name, product) in enumerate(STATIONS.items(), 1):
        mqtt = {
            "enterprise": "acme", "site": "plant", "area": "machining", "line": "clamping",
            "station": name, "port": free_port(),
        }  # fmt: skip
        station = {
            "line": "../line.yaml",
            "bundle": "store",
            "scanner": {
                "driver": "sim",
                "seed": number,
                "poses": "turntable4",
                "wrong_share": 0.05,
            },
            "broker": "embedded",
            "mqtt": mqtt,
            "outbox": "outbox.sqlite",
            "evidence": "parts",
            "trigger": {"source": "timer", "period_s": takt_s, "part_number": product},
            "runtime": {"threads": 1},
            "trusted_keys": ["../certificate_key.pem"],
            "commands": {
                "keys": [{"name": "engineer", "key": "../engineer.pub.pem", "roles": ["release"]}]
            },
            "release": {
                "keys": ["../release.pub.pem"],
                "golden_p99_ms": 60_000,  # a core that others use as well
                "shadow_parts": 0 if name == "station-3" else 3,
                "shadow_disagree": 0.4,
                "trial_parts": 10,
            },
        }
        (shop.out / name).mkdir()
        (shop.out / name / "station.yaml").write_text(yaml.safe_dump(station, sort_keys=False))
        found[name] = mqtt
    return found


def start(shop: Shop, stack: ExitStack) -> None:
    print("\n== 3. three stations, and an MES that listens to each")
    for name in STATIONS:
        file = f"{name}/station.yaml"
        shop.forge("bundle", "install", "clamping-1.fsb", "--activate", "--station", file)
        shop.background(stack, f"{name}.log", "run", "--station", file)
    for name in STATIONS:
        wait_for(shop.out / f"{name}.log", r"PASS|FAIL|UNSURE", f"a verdict of {name}")
        shop.background(stack, f"mes-{name}.log", "listen", "--station", f"{name}/station.yaml")
    for name in STATIONS:
        wait_for(shop.out / f"mes-{name}.log", r"birth", f"the MES of {name}")


def wait_for(path: Path, pattern: str, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not (path.is_file() and re.search(pattern, path.read_text(errors="replace"))):
        if time.monotonic() > deadline:
            raise Failed(f"{what} did not come in {START_S:.0f} s; see {path}")
        time.sleep(0.5)


def roll_out(
    shop: Shop, mqtt: dict[str, dict[str, Any]], release: int, first: str, wanted: int
) -> dict[str, Any]:
    """`first` alone, then the others. The rollout's own JSON line."""
    plan = {
        "name": f"clamping-{release}",
        "bundle": f"clamping-{release}.fsb",
        "serve": f"http://127.0.0.1:{free_port()}",
        "stations": [{"name": name, "mqtt": own} for name, own in mqtt.items()],
        "groups": [{"name": "canary", "stations": [first]}, {"name": "all", "share": 1}],
        "gates": {"max_failed": 0, "shadow_disagree": 0.34, "timeout_s": 1800},
    }
    path = shop.out / f"plan-{release}.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    print(f"  {path.name}: {first}, then the others")
    shop.forge("rollout", "check", path.name)
    out = shop.forge(
        "rollout", "start", path.name, "--key", "engineer.pem", "--json", wanted=wanted
    )
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def told(shop: Shop, name: str) -> dict[str, list[tuple[int, str, datetime]]]:
    """What its MES was told of deployments: id -> (number, state, time) as they came."""
    found: dict[str, list[tuple[int, str, datetime]]] = {}
    line = re.compile(r"(\d\d:\d\d:\d\d\.\d+) JOB +(\S+) +(\w+) \((\d+)\)")
    for when, job, state, number in line.findall((shop.out / f"mes-{name}.log").read_text()):
        told_at = datetime.strptime(when, "%H:%M:%S.%f")
        found.setdefault(job, []).append((int(number), state, told_at))
    return found


def require(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise Failed(f"{what}: {found}, expected {wanted}")
    print(f"  as it should be: {what}")


def report(shop: Shop, done: list[dict[str, Any]]) -> dict[str, Any]:
    """What happened, held against what should have."""
    good, bad = done
    require("release 2 is on every station", good["phase"], "SUCCEEDED")
    steps = {item["name"]: (item["step"], item["state"]) for item in bad["stations"]}
    wanted = dict.fromkeys(("station-1", "station-2"), ("WAITING", ""))
    wanted["station-3"] = ("FAILED", "ROLLED_BACK")
    require("release 3 was stopped", bad["phase"], "ROLLED_BACK")
    require("station-3 took it back by itself, nobody else was asked", steps, wanted)
    activation_ms, active, verdicts = [], {}, {}
    part_ms = {}
    for name in STATIONS:
        ends = []
        for steps_told in told(shop, name).values():
            known: dict[int, tuple[str, datetime]] = {}
            for number, state, at in steps_told:
                known.setdefault(number, (state, at))  # later ones tell how far a state is
            require(
                f"the MES of {name} was told every state, in order",
                [known[number][0] for number in sorted(known)][:-1],
                list(STATES),
            )
            first = dict(known.values())
            spent = first["TRIAL"] - first["ACTIVATING"]
            activation_ms.append(round(spent.total_seconds() * 1000))
            ends.append(known[max(known)][0])
        later = ["ROLLED_BACK"] if name == "station-3" else []
        require(f"how deployments of {name} ended", ends, ["SUCCEEDED", *later])
        listed = shop.forge("bundle", "list", "--station", f"{name}/station.yaml")
        active[name] = next(line.split()[0] for line in listed.splitlines() if "active" in line)
        log = (shop.out / f"{name}.log").read_text()
        part_ms[name] = round(median(int(ms) for ms in re.findall(r"  (\d+) ms$", log, re.M)))
        text = (shop.out / f"mes-{name}.log").read_text()
        verdicts[name] = count(re.findall(r" (PASS|FAIL|UNSURE|ERROR) +#", text))
    releases = [name.split("-r")[1].split("-")[0] for name in active.values()]
    require("releases that judge now", releases, ["2", "2", "2"])
    return {
        "active": active,
        "activation_ms": activation_ms,  # from ACTIVATING to TRIAL; the line goes on meanwhile
        "part_ms": part_ms,
        "verdicts": verdicts,
    }


def count(words: list[str]) -> dict[str, int]:
    """How often each word."""
    return {word: words.count(word) for word in sorted(set(words))}


def free_port() -> int:
    """Of this machine; taken by whoever is told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/new_line"), help="a new folder")
    parser.add_argument(
        "--bundle", type=Path, default=ROOT / "station_config/demo/bundle",
        help="bundle folder to start from (default: the demo's)",
    )  # fmt: skip
    parser.add_argument(
        "--certificate-key", type=Path, default=ROOT / "station_config/demo/certificate_key.pem",
        metavar="PEM", help="public key that its certificate is signed with (default: the demo's)",
    )  # fmt: skip
    parser.add_argument(
        "--takt", type=float, default=8.0, metavar="S", help="a part every S seconds (default 8)"
    )
    args = parser.parse_args()
    out = args.out.absolute()
    if out.exists():
        parser.error(f"{out} is there already; name another folder")
    out.mkdir(parents=True)
    shutil.copyfile(HERE / "line.yaml", out / "line.yaml")
    shutil.copyfile(args.certificate_key, out / "certificate_key.pem")
    shop, begun = Shop(out, sys.executable), time.monotonic()
    try:
        keys(shop)
        bundles(shop, args.bundle.absolute())
        with ExitStack() as stack:
            mqtt = stations(shop, args.takt)
            start(shop, stack)
            print("\n== 4. release 2, by groups")
            done = [roll_out(shop, mqtt, 2, "station-1", 0)]
            print("\n== 5. release 3 is bad")
            done.append(roll_out(shop, mqtt, 3, "station-3", 1))
            time.sleep(3.0)  # the last words to the MES
        print("\n== what happened")
        found = report(shop, done)
    except Failed as error:
        print(f"new_line: {error}", file=sys.stderr)
        return 1
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found["cpu_s"] = round(used.ru_utime + used.ru_stime)
    found["wall_s"] = round(time.monotonic() - begun)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
