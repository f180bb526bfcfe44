"""TRL's SFTTrainer for the two layouts of an example."""

from __future__ import annotations

from typing import Any

import torch
from trl import SFTTrainer

from training.large.checkpoint import FullResume


class TokenMean(FullResume, SFTTrainer):
    """The loss is the mean over the supervised tokens of a whole step, however it is divided into
    micro-batches and processes.

    The class of Qwen2.5-VL says that its forward takes no token count, so the Trainer would average
    the means of micro-batches; but TRL computes the loss outside of it, with the count.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True


class SequentialTrainer(TokenMean):
    """The answer as one text, every token of it the same weight: TRL's own loss."""


class BranchTrainer(TokenMean):
    """Packed branches (see `training.large.branches`) with the batches of `BranchCollator`.

    The mean is weighted by the weights of the tokens.
    """

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """`num_items_in_batch`: weight of the step's tokens in all processes, see below."""
        weight = inputs["weight"]
        # TRL's fused head: the vocabulary is only ever spanned for supervised positions.
        outputs = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            position_ids=inputs["position_ids"].transpose(0, 1).contiguous(),
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            shift_labels=inputs["shift_labels"],
            fused_lm_head=True,
        )
        total = weight.sum() if num_items_in_batch is None else num_items_in_batch
        loss = -(outputs.log_probs * weight).sum() / total
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over them
        self._count(inputs, outputs)
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, torch.Tensor]], device: torch.device
    ) -> torch.Tensor | None:
        """Sum of the token weights of a step; the Trainer's own counts tokens."""
        if not batch_samples:
            return None
        weights = torch.stack([batch["weight"].sum() for batch in batch_samples])
        total: torch.Tensor = self.accelerator.gather(weights.sum().to(device)).sum()
        return total

    def _count(self, inputs: dict[str, torch.Tensor], outputs: Any) -> None:
        """Tokens seen and the share of supervised tokens that are right, for the log."""
        mode = "train" if self.model.training else "eval"
        seen = (inputs["input_ids"] != self._tokenizer.pad_token_id).sum()
        counts = torch.stack([seen, outputs.is_top1.sum().long(), outputs.label_mask.sum()])
        tokens, right, asked = self.accelerator.gather(counts[None]).sum(0).tolist()
        self._metrics[mode]["mean_token_accuracy"].append(right / max(1, asked))
        if mode == "train":
            self._total_train_tokens += tokens
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
