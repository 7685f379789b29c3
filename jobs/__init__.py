"""Thin entry points, one verb a file: parse, call, exit code."""
