"""Text <-> token ids with the bundle's tokenizer. It knows no prompt and no grammar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from forge_station.errors import BundleError, ModelError

_MOST_KNOWN = 4096


class TextCodec:
    """A `tokenizers` tokenizer that adds nothing and refuses words it does not know."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._unknown_id = None if unknown is None else tokenizer.token_to_id(unknown)
        self._known: dict[str, tuple[int, ...]] = {}

    @classmethod
    def open(cls, path: Path) -> TextCodec:
        """Read tokenizer.json."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise BundleError("tokenizer cannot be read", which=path, got=error) from error
        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # the binding raises bare Exception and nothing narrower
            raise BundleError("tokenizer is not valid", which=path, got=error) from error

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written in it become single ids."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if self._unknown_id is not None and self._unknown_id in encoding.ids:
            at = encoding.ids.index(self._unknown_id)
            first, last = encoding.offsets[at]
            raise ModelError(
                "text has a word that the model's tokenizer does not know",
                which=repr(text[first:last]),
                got=repr(text if len(text) < 80 else text[:77] + "..."),
                action="use the words of the bundle's catalogue, or train a model on the new word",
            )
        ids: list[int] = encoding.ids
        return ids

    def encode_key(self, text: str) -> tuple[int, ...]:
        """`encode` of a short text that comes again and again: a key or a line."""
        if text not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[text] = tuple(self.encode(text))
        return self._known[text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens kept."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int:
        """Id of one token written exactly; BundleError when the tokenizer lacks it."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise BundleError("tokenizer lacks a token", which=token)
        return int(found)
