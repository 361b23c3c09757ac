"""Loaded by a spawned worker of the stock callers: see `megatron_jobs.without_gpu`."""

import importlib.abc
import importlib.util
import sys


def _without_gpu(module):
    module.current_device = lambda: "cpu"
    module.device_count = lambda: 1
    for asked in ("synchronize", "set_device"):
        setattr(module, asked, lambda *_: None)


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
            _without_gpu(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
