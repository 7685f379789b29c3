"""Which row of the target's embedding fills the draft slots.

DFlash feeds the drafter one embedding for every token it has yet to guess. The row must exist in
the target's own (frozen, shared) embedding and mean nothing else: a row that text, the chat
template or the end of a response also uses would tell the drafter something false.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_core.checkpoints.tokenizer_files import AddedToken, TokenizerFiles, read_tokenizer
from dflash_core.errors import UserError
from dflash_core.types import Checkpoint

_MASK_NAME = re.compile(r"[<\[({]\W*mask(_?token)?\W*[>\])}]", re.IGNORECASE)
"""<|mask|>, <mask>, [MASK], <|mask_token|> ..."""
_RESERVED_NAME = re.compile(r"reserved|unused|empty|placeholder|dummy|spare|extra_id", re.IGNORECASE)


@dataclass(frozen=True)
class MaskToken:
    """The chosen row and why it was chosen."""

    id: int
    text: str | None
    """None where the tokenizer has no token for the row."""
    reason: str
    """One sentence for people."""


def choose_mask_token(checkpoint: Checkpoint, explicit: int | None = None) -> MaskToken:
    """The mask row: `explicit` if it can serve, else the safest unused row.

    In this order: an added token named like a mask, the first row beyond the tokenizer, an unused
    special token (reserved-looking names first, then the highest id). Never pad, bos, eos or unk.
    Raises UserError if `explicit` cannot serve, or if there is no unused row.
    """
    tokenizer = read_tokenizer(checkpoint.path)
    taken = _taken(checkpoint, tokenizer)
    if explicit is not None:
        return _explicit(checkpoint, tokenizer, taken, explicit)
    free = [token for token in tokenizer.added if token.id not in taken]
    for token in free:
        if _MASK_NAME.fullmatch(token.text):
            return MaskToken(
                token.id, token.text, f"{token.text} (id {token.id}) is the target's own mask token."
            )
    first_spare = checkpoint.num_tokenizer_ids
    if first_spare < checkpoint.config.vocab_size:
        return MaskToken(
            first_spare,
            None,
            f"Row {first_spare} is the first of {checkpoint.config.vocab_size - first_spare} rows of the "
            "embedding that no token uses.",
        )
    special = [token for token in free if token.special]
    if not special:
        raise UserError(
            f"{checkpoint.path} has no unused row in its embedding to serve as mask token: "
            "name a token that never occurs in its text with --mask-token-id"
        )
    token = max(special, key=lambda token: (_RESERVED_NAME.search(token.text) is not None, token.id))
    return MaskToken(
        token.id,
        token.text,
        f"{token.text} (id {token.id}) is a special token that neither the chat template nor the end of a "
        "response uses.",
    )


def _taken(checkpoint: Checkpoint, tokenizer: TokenizerFiles) -> dict[int, str]:
    """Id -> the use that rules it out as mask token."""
    taken = {token.id: "part of the chat template" for token in tokenizer.added if _named(token, checkpoint)}
    taken |= {token_id: f"the {role} token" for role, token_id in tokenizer.role_ids.items()}
    if checkpoint.bos_id is not None:
        taken[checkpoint.bos_id] = "the bos token"
    if checkpoint.pad_id is not None:
        taken[checkpoint.pad_id] = "the pad token"
    return taken | dict.fromkeys(checkpoint.eos_ids, "an eos token")


def _named(token: AddedToken, checkpoint: Checkpoint) -> bool:
    # Added tokens only: they are matched as wholes, so their text in the template is their use. The
    # text of an ordinary entry ("a", "user") is in any template's code.
    return token.text in checkpoint.chat_template


def _explicit(
    checkpoint: Checkpoint, tokenizer: TokenizerFiles, taken: dict[int, str], explicit: int
) -> MaskToken:
    rows = checkpoint.config.vocab_size
    if not 0 <= explicit < rows:
        raise UserError(
            f"--mask-token-id {explicit} is no row of the embedding of {checkpoint.path}: "
            f"pass 0 to {rows - 1}"
        )
    if explicit in taken:
        raise UserError(
            f"--mask-token-id {explicit} is {taken[explicit]} of {checkpoint.path}: "
            "pass a token that the model never sees, or leave the choice to us"
        )
    text = next((text for text, token_id in tokenizer.vocabulary.items() if token_id == explicit), None)
    ordinary = text is not None and explicit not in {token.id for token in tokenizer.added}
    note = " It is an ordinary entry of the vocabulary, so text may use it too." if ordinary else ""
    return MaskToken(explicit, text, f"Row {explicit} was named with --mask-token-id.{note}")
