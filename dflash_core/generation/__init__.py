"""Prompts answered by the target, many at a time."""
