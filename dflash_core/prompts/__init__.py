"""Prompts: where they come from, how they are read, drawn and split."""
