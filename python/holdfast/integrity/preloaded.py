"""Imported by a process that forks trainers of Megatron-Core, which says in its import what else is not installed."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.dist_checkpointing  # type: ignore[import-not-found,import-untyped]  # noqa: F401
