"""Training a drafter on the target's hidden states and answers."""
