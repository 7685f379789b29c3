"""The target's hidden states: extracted, written, checked and read."""
