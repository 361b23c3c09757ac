"""The CPU in place of the GPU that frameworks ask for. PyTorch is imported at the first call only."""

import contextlib
import functools
import os


def replace_calls(cuda, devices=1):
    """Replaces the calls of `torch.cuda` that the stock callers make."""

    def current_device():
        import torch

        return torch.device("cpu")

    cuda.current_device = current_device
    cuda.device_count = lambda: devices
    for name in ("synchronize", "set_device"):  # a function each: torch._dynamo has a rule for each object
        setattr(cuda, name, lambda *_, **__: None)


def replace_memory():
    """Makes and moves tensors in CPU memory where GPU memory is asked for, in this thread."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnTheCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            if function is torch.Tensor.cuda:
                return args[0]
            if function is torch.Tensor.to:
                args = tuple("cpu" if str(value).startswith("cuda") else value for value in args)
            return function(*args, **kwargs)

    OnTheCpu().__enter__()


def without_gpu():
    """Lets the stock callers run where there is no GPU: here, and in the workers that this process spawns."""
    import torch

    replace_calls(torch.cuda)
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # of sitecustomize.py


def on_the_cpu():
    """As `without_gpu`, and GPU memory is CPU memory: for ranks that exchange states."""
    without_gpu()
    replace_memory()


def replace_gpu():
    """Replaces also streams, random states, modules, optimizers and the NCCL backend: for whole programs."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda
    replace_calls(cuda, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    replace_memory()
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_, **__: 0
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.Stream = cuda.Event = cuda.stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    names = "empty_cache reset_peak_memory_stats manual_seed manual_seed_all set_rng_state _lazy_call _lazy_init"
    for name in names.split():
        setattr(cuda, name, lambda *_, **__: None)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.type = _of_a_gpu(torch.Tensor.type)
    for optimizer in (torch.optim.Adam, torch.optim.AdamW):
        optimizer.__init__ = _with_a_rate(optimizer.__init__)
        optimizer.state_dict = _with_steps(optimizer.state_dict)
    dist.init_process_group = _on_gloo(dist.init_process_group)
    dist.new_group = _on_gloo(dist.new_group)


class _Stream(contextlib.AbstractContextManager):
    """A stream or an event: all work is complete at every query."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def __exit__(self, *_):
        return None

    def query(self):
        return True

    def record_event(self, *_):
        return self

    def nothing(self, *_):
        pass

    wait_stream = wait_event = synchronize = record = nothing


def _of_a_gpu(kind):
    """The distributed optimizer takes tensors of a GPU alone, and knows them by the name of their type."""

    @functools.wraps(kind)
    def named(self, *args, **kwargs):
        name = kind(self, *args, **kwargs)
        return name if args or kwargs else "torch.cuda." + name.rpartition(".")[2]

    return named


def _with_a_rate(init):
    """Of fused optimizers the rate has a default, and Megatron hands on none."""

    @functools.wraps(init)
    def with_a_rate(self, params, *args, **kwargs):
        if kwargs.get("lr", 0.0) is None:
            kwargs["lr"] = 1e-3
        init(self, params, *args, **kwargs)

    return with_a_rate


def _with_steps(state_dict):
    """Megatron makes the state as that of Apex's Adam, which has no step, and reads it as that of PyTorch's."""

    @functools.wraps(state_dict)
    def with_steps(self):
        import torch

        state = state_dict(self)
        for of_parameter in state["state"].values():
            of_parameter.setdefault("step", torch.tensor(0.0))
        return state

    return with_steps


def _on_gloo(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("pg_options", None)
        return make(*args, **kwargs)

    return made
