"""Imported last by the process that forks trainers: their collections leave alone what the server has imported."""

import gc

gc.collect()
gc.freeze()
