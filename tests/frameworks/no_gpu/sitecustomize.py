"""Loaded by a spawned worker of the stock callers: see `cpu_for_gpu.without_gpu`."""

import importlib.abc
import importlib.util
import sys

import cpu_for_gpu


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for torch, which other processes need not import for this."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            cpu_for_gpu.replace_calls(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
