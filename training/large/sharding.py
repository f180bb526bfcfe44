"""FSDP2: what is sharded, and the proof that it really is.

accelerate falls back to plain data parallelism without a word where it cannot shard (on a CPU, or
with a configuration it does not understand): every process then holds all weights, and a run that
was planned for eight shards dies of memory, or worse, does not. `require_sharding` says so.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from training.large.checkpoint import RunError

BLOCKS = ("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock")
"""Classes that become one shard group each; the rest of the model is the last group."""


def fsdp_config(state_dict: str = "FULL_STATE_DICT") -> dict[str, Any]:
    """Settings of `TrainingArguments.fsdp_config`; the files in training/runs say the same."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": list(BLOCKS),
        "reshard_after_forward": True,
        "state_dict_type": state_dict,
        "cpu_ram_efficient_loading": False,
    }


def require_sharding(accelerator: Any, model: Any) -> None:
    """RunError unless `model` is sharded by FSDP2."""
    parameters = list(model.parameters())
    whole = sum(not isinstance(parameter, DTensor) for parameter in parameters)
    if not getattr(accelerator, "is_fsdp2", False) or whole:
        raise RunError(
            "the model is not sharded",
            expected=f"FSDP2 and {len(parameters)} sharded parameters",
            got=f"{accelerator.distributed_type}, {whole} parameters whole in every process",
            action="start with torchrun or accelerate on GPUs, or leave out --fsdp",
        )


class ShardingCheck(TrainerCallback):
    """Calls `require_sharding` before the first step of a run that asked for FSDP."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.checked = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.checked:
            require_sharding(self.trainer.accelerator, self.trainer.model_wrapped)
            self.checked = True
