"""Names of PyTorch Distributed Checkpoint that its older versions lack: PyTorch 2.6 is the oldest."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, staging, state_dict_saver

from holdfast.errors import Error

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
else:

    class _AsyncCheckpointerType(enum.Enum):
        THREAD = "thread"
        PROCESS = "process"

    @dataclasses.dataclass
    class _AsyncSaveResponse:
        staging_completion: Future[None]
        upload_completion: Future[None]

    @dataclasses.dataclass
    class _StagingOptions:
        use_pinned_memory: bool = True
        use_shared_memory: bool = True
        use_async_staging: bool = True
        use_non_blocking_copy: bool = True

    class _DefaultStager:
        """No stager is of this class."""

    AsyncCheckpointerType = getattr(state_dict_saver, "AsyncCheckpointerType", _AsyncCheckpointerType)
    AsyncSaveResponse = getattr(state_dict_saver, "AsyncSaveResponse", _AsyncSaveResponse)
    StagingOptions = getattr(staging, "StagingOptions", _StagingOptions)
    DefaultStager = getattr(staging, "DefaultStager", _DefaultStager)
    CURRENT_DCP_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)

__all__ = [
    "CURRENT_DCP_VERSION", "AsyncCheckpointerType", "AsyncSaveResponse", "DefaultStager", "StagingOptions", "hand_on",
]  # fmt: skip


# Arguments that older versions lack, and what they do without.
_NEW = {"async_checkpointer_type": AsyncCheckpointerType.THREAD, "async_stager": None, "no_dist": False,
        "use_collectives": True}  # fmt: skip


def hand_on(call: Callable[..., Any], state_dict: Any, **options: Any) -> Any:
    """Calls a function of the framework.

    Raises:
        Error: UNIMPLEMENTED if its version lacks an argument, and would do something else.
    """
    known = inspect.signature(call).parameters
    for name in [name for name in options if name in _NEW and name not in known]:
        alone = name == "no_dist" and not (dist.is_available() and dist.is_initialized())
        if options.pop(name) is not _NEW[name] and not alone:
            raise Error("UNIMPLEMENTED", f"{call.__name__}: {name}= needs a newer PyTorch")
    return call(state_dict, **options)
