"""The corpus: conversations as token ids, and which of their tokens the target itself spoke."""
