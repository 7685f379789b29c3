"""Target and drafter as torch modules, and the files that they come from."""
