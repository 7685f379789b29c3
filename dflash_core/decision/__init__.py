"""The gate's decision, and the report that explains it."""
