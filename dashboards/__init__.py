"""Read-only views of what MLflow holds; nothing here writes, and nothing here is needed to run a job."""
