"""The algorithm and the numbers: drafter, decoding, acceptance, statistics, stage artifacts.

Plain torch, transformers and pyarrow; neither Ray nor MLflow. Nothing is imported here, so
that `import dflash_core.errors` costs a millisecond and `--help` never loads torch.
"""
