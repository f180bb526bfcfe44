"""Run the steps of a Dockerfile in a clean root, where no container engine is at hand. Root only.

    python3 deploy/try_install.py deploy/docker/Dockerfile wheelhouse -- doctor
    python3 deploy/try_install.py deploy/docker/Dockerfile wheelhouse --mount DIR:/data \\
        -- demo --help -- bundle verify --unsigned --self-test /data/bundle

FROM becomes a fresh Debian (debootstrap, from the mirror of this machine), RUN a command in its
chroot, COPY a copy, USER a change of user; what follows each `--` are arguments for ENTRYPOINT, run
without a network. A Dockerfile is tried that way, not replaced: no layers, no cache, no limits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SUITES = {"debian:bookworm-slim": "bookworm"}


@dataclass
class Stage:
    """One root folder, as far as its instructions have been carried out."""

    root: Path
    user: str = "0"
    folder: str = "/"
    entry: list[str] = field(default_factory=list)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Name and argument of each instruction; comments left out, continued lines joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, argument.strip()) for name, _, argument in found]


def build(file: Path, context: Path, work: Path) -> Stage:
    """Carry out all stages; the last one. Raises CalledProcessError, ValueError."""
    variables: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage = Stage(work)
    for name, argument in instructions(file):
        text = re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], argument)
        print(f"{name} {text}", flush=True)
        if name == "ARG":
            key, _, value = text.partition("=")
            variables[key] = value
        elif name == "FROM":
            image, _, alias = text.partition(" AS ")
            stage = Stage(_fresh_root(image, work, len(stages)))
            stages[alias or str(len(stages))] = stage
        elif name == "RUN":
            _inside(stage, ["/bin/sh", "-ec", text], user="0")
        elif name == "COPY":
            _copy(text, stage, stages, context)
        elif name == "USER":
            stage.user = text
        elif name == "WORKDIR":
            stage.folder = text
        elif name == "ENTRYPOINT":
            stage.entry = json.loads(text)
        elif name not in ("CMD", "HEALTHCHECK", "STOPSIGNAL", "VOLUME"):
            raise ValueError(f"{file}: instruction {name} is not known here")
    return stage


def _fresh_root(image: str, work: Path, number: int) -> Path:
    """A copy of a minimal Debian, which is fetched once."""
    if image not in SUITES:
        raise ValueError(f"no way to make {image} here, only {', '.join(SUITES)}")
    base, root = work / "base", work / f"stage-{number}"
    if not base.exists():
        half = work / "base.half"
        shutil.rmtree(half, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", SUITES[image], str(half), *_mirror()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for name in ("etc/resolv.conf", "etc/apt/apt.conf.d", "etc/ssl/certs"):
            _bring(Path("/") / name, half / name)
        half.rename(base)
    subprocess.run(["cp", "-a", str(base), str(root)], check=True)
    return root


def _mirror() -> list[str]:
    """Where this machine has its own packages from; empty: debootstrap's default."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    done = subprocess.run(command, capture_output=True, text=True)
    return [line.rstrip("/") for line in done.stdout.splitlines() if "debian" in line][:1]


def _bring(source: Path, target: Path) -> None:
    """How this machine reaches its mirror goes for the root as well."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _copy(text: str, stage: Stage, stages: dict[str, Stage], context: Path) -> None:
    words = text.split()
    origin = context
    if words[0].startswith("--from="):
        origin = stages[words.pop(0).removeprefix("--from=")].root
    source, target = (word.lstrip("/") for word in words)
    (stage.root / target).mkdir(parents=True, exist_ok=True)
    command = ["cp", "-a", f"{origin / source}/.", str(stage.root / target)]
    subprocess.run(command, check=True)


def _inside(
    stage: Stage, command: list[str], user: str, network: bool = True, mount: str = ""
) -> int:
    """Run in the root, in a mount namespace of its own; the exit code, with network checked."""
    root, folder = stage.root, stage.folder
    lines = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    if mount:
        source, _, target = mount.partition(":")
        lines += [f"mkdir -p {root}{target}", f"mount --bind {source} {root}{target}"]
    lines.append(f'exec chroot --userspec={user}:{user} {root} /bin/sh -c \'cd "$0" && exec "$@"\' '
                 f'{folder} "$@"')  # fmt: skip
    spaces = ["unshare", "--mount", *([] if network else ["--net"])]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": folder,
                   "DEBIAN_FRONTEND": "noninteractive"}  # fmt: skip
    environment |= {k: v for k, v in os.environ.items() if network and k.lower().endswith("_proxy")}
    done = subprocess.run(
        [*spaces, "/bin/sh", "-ec", "\n".join(lines), "sh", *command], env=environment,
        check=network,
    )  # fmt: skip
    return done.returncode


def split(words: list[str]) -> list[list[str]]:
    """At each `--`: the program's own arguments, then those of each command."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


def main() -> int:
    """Entry point; highest exit code of the commands, 64 for wrong usage, 70 when a step fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("context", type=Path, help="folder that COPY copies: the wheelhouse")
    parser.add_argument("--mount", default="", metavar="DIR:PATH", help="a folder for the command")
    parser.add_argument("--work", type=Path, help="keep the roots here (default: removed)")
    parser.epilog = "after each --: arguments for ENTRYPOINT"
    own, *commands = split(sys.argv[1:])
    args = parser.parse_args(own)
    missing = [name for name in ("debootstrap", "unshare", "chroot") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing or not args.context.is_dir():
        print(f"try_install: needs root, a context folder, and {', '.join(missing) or 'no more'}",
              file=sys.stderr)  # fmt: skip
        return 64
    work = args.work or Path(tempfile.mkdtemp(prefix="try-install-"))
    try:
        work.mkdir(parents=True, exist_ok=True)
        stage = build(args.dockerfile, args.context, work)
        codes = []
        for arguments in commands or [[]]:
            command = [*stage.entry, *arguments]
            print("-> " + " ".join(command), flush=True)
            codes.append(_inside(stage, command, stage.user, network=False, mount=args.mount))
            print(f"exit code {codes[-1]}", flush=True)
        return max(map(abs, codes))
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"try_install: {error}", file=sys.stderr)
        return 70
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
