"""The commands and files of training/runs say what the code does."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest
import yaml

from training.large import grpo, sft, shapes, sharding


@pytest.fixture(scope="module")
def folder(repository):
    return repository / "training" / "runs"


@pytest.mark.parametrize("name", ["fsdp2_8gpu.yaml", "fsdp2_2nodes.yaml"])
def test_accelerate_files_shard_as_the_code_does(folder, name) -> None:
    config = yaml.safe_load((folder / name).read_text())
    given = config["fsdp_config"]
    wanted = sharding.fsdp_config()
    assert config["distributed_type"] == "FSDP" and config["mixed_precision"] == "bf16"
    assert given["fsdp_transformer_layer_cls_to_wrap"].split(",") == list(sharding.BLOCKS)
    for name in ("version", "auto_wrap_policy", "reshard_after_forward", "state_dict_type"):
        assert given[f"fsdp_{name}"] == wanted[name]
    assert given["fsdp_cpu_ram_efficient_loading"] is wanted["cpu_ram_efficient_loading"]


def test_every_command_of_the_runs_is_understood(folder) -> None:
    text = (folder / "README.md").read_text().replace("\\\n", " ")
    found = re.findall(r"-m training\.(sft|grpo) (--model .*)", text)
    assert len(found) >= 6
    for command, words in found:
        parser = argparse.ArgumentParser(exit_on_error=False)
        (sft if command == "sft" else grpo).add_options(parser)
        if command == "sft":
            shapes.add_options(parser)
        args = parser.parse_args(shlex.split(words, comments=True))
        assert args.dry_run if "--dry-run" in words else args.examples and args.out
