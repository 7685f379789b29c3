"""A target checkpoint, opened: validated and identified before anything is loaded."""
