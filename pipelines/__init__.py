"""The only place for Ray and MLflow: stages as fan-outs, the realign flow, the registry."""
