"""Draft-verify decoding, what it accepts, and how sure one can be of that."""
