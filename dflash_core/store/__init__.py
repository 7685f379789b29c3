"""What stages leave behind, and who may work on what."""
