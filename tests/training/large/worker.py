"""A process of a torchrun launch in the tests: `worker.py [--shim] [--again WORDS] WORDS...`.

Runs `training.sft` with the words it is given. `--shim` lets accelerate shard on a CPU, which it
does for GPUs only; it is for tests and belongs nowhere else. `--again` runs a second command, which
must refuse, and prints what it said.
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from training import sft


def shard_on_cpu() -> None:
    """Make AcceleratorState take a sharding plug-in on CPUs as it does on GPUs."""
    original = AcceleratorState.__init__
    plugins: list[object] = []

    def patched(self, *args, fsdp_plugin=None, **kwargs):  # type: ignore[no-untyped-def]
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            plugins.append(fsdp_plugin)
        if plugins:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = plugins[0]

    AcceleratorState.__init__ = patched  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    words = sys.argv[1:]
    if words[0] == "--shim":
        shard_on_cpu()
        words = words[1:]
    again = ""
    if words[0] == "--again":
        again, words = words[1], words[2:]
    sft.main(words)
    if again:
        try:
            sft.main(shlex.split(again))
        except SystemExit as refused:
            print(f"REFUSED {refused}", flush=True)


if __name__ == "__main__":
    main()
