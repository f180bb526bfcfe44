"""Qwen2.5-VL checkpoints: where they come from, what of them learns, how they resume and end.

A checkpoint is a folder (config.json, tokenizer.json, safetensors) or a name on the Hugging Face
hub. A run ends in one too, with the adapter merged: what `export.bundle` reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.utils import cached_file

from forge_station.contract.error import ContractError

TOKENIZER, CONFIG = "tokenizer.json", "config.json"
MERGED, CARD = "merged", "training_card.json"
NAMES = {"3b": "Qwen/Qwen2.5-VL-3B-Instruct", "7b": "Qwen/Qwen2.5-VL-7B-Instruct"}
"""Short names of published checkpoints."""
LANGUAGE_LINEAR = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Every linear layer of the language model. A list of names, or `all-linear`, would also match the
vision tower, whose layers have the same names."""


class RunError(ContractError):
    """A run that cannot start or go on as asked."""


def checkpoint_file(model: str, name: str) -> Path:
    """A file of a checkpoint folder or hub name. RunError where there is none."""
    source = NAMES.get(model, model)
    if Path(source).is_dir():
        path = Path(source) / name
        if not path.is_file():
            raise RunError("checkpoint lacks a file", which=path)
        return path
    try:
        found = cached_file(source, name)
    except (OSError, ValueError) as error:
        raise RunError(
            "checkpoint cannot be found",
            which=model,
            expected=f"a folder, a name on the hub, or one of {', '.join(NAMES)}",
            got=str(error).split("\n")[0],
            action="give a local folder when the hub cannot be reached",
        ) from error
    return Path(str(found))


def load_model(model: str, dtype: torch.dtype) -> Qwen2_5_VLForConditionalGeneration:
    """The checkpoint's weights; scaled-dot-product attention, which takes the branches' masks."""
    config = json.loads(checkpoint_file(model, CONFIG).read_text(encoding="utf-8"))
    if config.get("model_type") != "qwen2_5_vl":
        raise RunError(
            "not a Qwen2.5-VL checkpoint",
            which=model,
            expected="model_type qwen2_5_vl",
            got=config.get("model_type"),
        )
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        NAMES.get(model, model), dtype=dtype, attn_implementation="sdpa"
    )


def stored_dtype(model: str) -> torch.dtype:
    """The precision that the checkpoint's weights are stored in, float32 where it says nothing."""
    config = json.loads(checkpoint_file(model, CONFIG).read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def lora_config(rank: int, alpha: int, dropout: float) -> LoraConfig:
    """Adapters on the language model only."""
    return LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=LANGUAGE_LINEAR
    )


class FullResume:
    """Mix in before a Trainer: full weights are really loaded on resume and at the end.

    Checkpoints carry the published names of weights (`visual.*`), the model in memory others
    (`model.visual.*`); the Trainer loads one into the other with strict=False, finds no name it
    knows, warns, and goes on with the weights of the start (huggingface/transformers#43701).
    Adapters and FSDP checkpoints take another way and are left alone.
    """

    def _load_from_checkpoint(self, path: str, model: Any = None) -> None:
        if self._others_load():
            super()._load_from_checkpoint(path, model)  # type: ignore[misc]
        else:
            self._load_all(path)

    def _load_best_model(self) -> None:
        if self._others_load():
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._load_all(self.state.best_model_checkpoint)  # type: ignore[attr-defined]

    def _others_load(self) -> bool:
        return bool(self.is_fsdp_enabled or hasattr(self.model, "peft_config"))  # type: ignore[attr-defined]

    def _load_all(self, path: str) -> None:
        model = self.model  # type: ignore[attr-defined]
        fresh = type(model).from_pretrained(path, dtype=model.dtype)
        model.load_state_dict(fresh.state_dict(), strict=True)


def last_complete(run: Path) -> Path | None:
    """The newest checkpoint of a run that was written to its end, or None.

    The trainer's state is the last file of a checkpoint; one that a kill cut short lacks it.
    """
    found: dict[int, Path] = {}
    for state in run.glob("checkpoint-*/trainer_state.json"):
        try:
            found[int(json.loads(state.read_text(encoding="utf-8"))["global_step"])] = state.parent
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found[max(found)] if found else None


def write_merged(trainer: Any, source: str, run: Path, card: Mapping[str, Any]) -> Path:
    """Write the trained model of `trainer` as a plain checkpoint folder `run/merged`.

    Called by every process; the main one writes. Weights are merged in float32 and stored in the
    precision of `source`. The folder appears by rename.
    """
    accelerator = trainer.accelerator
    state = accelerator.get_state_dict(trainer.model)
    folder = run / MERGED
    if accelerator.is_main_process:
        plain = _merged(trainer, source, state).to(stored_dtype(source))
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        plain.save_pretrained(partial)
        shutil.copyfile(checkpoint_file(source, TOKENIZER), partial / TOKENIZER)
        (partial / CARD).write_text(json.dumps(card, indent=1, sort_keys=True), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    accelerator.wait_for_everyone()
    return folder


def _merged(
    trainer: Any, source: str, state: Mapping[str, torch.Tensor]
) -> Qwen2_5_VLForConditionalGeneration:
    plain = load_model(source, torch.float32)
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if not isinstance(trained, PeftModel):
        outcome = plain.load_state_dict(state, strict=False)
        tied = {"lm_head.weight"} if plain.config.tie_word_embeddings else set()
        if outcome.unexpected_keys or set(outcome.missing_keys) - tied:
            raise RunError(
                "trained weights do not fit the model",
                which=source,
                got=[*outcome.unexpected_keys, *outcome.missing_keys][:3],
            )
        return plain
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    adapter = get_peft_model_state_dict(trained, state_dict=dict(state))
    wrapped = get_peft_model(plain, trained.peft_config["default"])
    outcome = set_peft_model_state_dict(wrapped, adapter)
    if outcome.unexpected_keys:
        raise RunError("adapter does not fit the model", got=outcome.unexpected_keys[:3])
    return wrapped.merge_and_unload()
