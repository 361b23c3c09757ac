"""
The C++ runtime of holdfast. Use the package; this module has no stable interface.
"""

from collections.abc import Sequence


class Device:
    """A place that tensors live in; a test's stand-in derives from it."""

    def __init__(self) -> None: ...

    def name(self) -> str: ...

    def order_after(self, stream: int) -> None:
        """Later copies come after what the stream has queued so far."""

def cuda_device(ordinal: int) -> Device:
    """The CUDA device, kept for the life of the process."""

def hip_device(ordinal: int) -> Device:
    """The HIP device, kept for the life of the process."""

class Plan:
    """What one rank writes: files, and the place of every byte."""

    def __init__(self) -> None: ...

    def add_file(self, name: str) -> None:
        """Begins a file; what is added next goes to its end."""

    def add_tensor(self, name: str, dtype: str, shape: Sequence[int], address: int, bytes: int, device: Device | None, stream: int) -> int:
        """
        Appends a tensor's bytes; returns the segment's index for CRC-32 slots.
        """

    def add_literal(self, bytes: bytes, crc32_slots: Sequence[tuple[int, int]]) -> None:
        """
        Appends bytes of the format's own. A slot is (offset in the bytes, segment).
        """

    def add_safetensors(self, file_name: str, tensors: Sequence[tuple[str, str, Sequence[int], int, int, Device, int]], metadata: Sequence[tuple[str, str]], attempt: str, replicated: bool = False) -> None:
        """Adds a whole safetensors file; `replicated`: see PlannedFile."""

    def extent(self) -> tuple[int, int, int]:
        """What `renew_to` goes back to."""

    def renew_to(self, file_name: str, extent: tuple[int, int, int], addresses: Sequence[int]) -> None:
        """
        Drops all that was added to a plan of one file since `extent`, and gives the rest a save's name and addresses.
        """

    @property
    def file_bytes(self) -> int:
        """Length of the last file so far."""

    @property
    def total_bytes(self) -> int: ...

class ModelPlan(Plan):
    """A plan that begins with a safetensors file, for many saves."""

    def __init__(self, file_name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], bytes: Sequence[int], metadata: Sequence[tuple[str, str]]) -> None: ...

    def renew(self, attempt: str, addresses: Sequence[int], devices: Sequence[Device], streams: Sequence[int]) -> None:
        """
        Gives the file a save's attempt and addresses, and drops all further files. Devices and streams are empty for tensors of the host.
        """

class TensorTable:
    """What torch says of strided tensors, without their values."""

    def __init__(self, tensors: list) -> None: ...

    def equals(self, other: TensorTable) -> bool:
        """
        Whether all but the addresses of the groups is equal: tensors overlap alike.
        """

    def is_like(self, other: TensorTable) -> bool:
        """Whether all but the addresses is equal."""

    def copied(self) -> list[int]:
        """Indices of tensors that must be copied to be saved."""

    def in_host(self) -> tuple:
        """
        Addresses and bytes of what is contiguous in host memory as it reads, zeros for the
        others, and the indices of the others.
        """

    def groups(self) -> list:
        """(begin, end, indices) of each run of memory, in the tensors' order."""

    def addresses(self) -> list[int]:
        """Where each group begins."""

class SaveHandle:
    """One save under way."""

    def wait_staged(self, timeout: float | None = None) -> None: ...

    def wait_staged_on(self, device: Device, stream: int) -> None: ...

    def wait_durable(self, timeout: float | None = None) -> dict: ...

    def is_done(self) -> bool: ...

    def confirm(self, fault: str) -> None: ...

    def cancel(self) -> None: ...

    def progress(self) -> dict: ...

    @property
    def epoch(self) -> int: ...

    @property
    def worker_pid(self) -> int | None: ...

class Checkpointer:
    """Staging memory and the workers behind it."""

    def __init__(self, options: dict) -> None: ...

    def create_beside(self, options: dict) -> Checkpointer: ...

    def save(self, name: str, plan: Plan, step: int, replace: bool, attempt: str, files_only: bool, confirm: bool = False, parent: str = '', single_file: bool = False, saved_after_ns: int = 0) -> SaveHandle: ...

    def flush(self, timeout: float | None = None) -> None: ...

    def trim(self) -> None: ...

    def register_device(self, device: Device) -> None: ...

    def staging(self) -> dict: ...

    def close(self) -> None: ...

def check_options(options: dict) -> None:
    """Refuses what no Checkpointer would take."""

def option_names() -> list[str]:
    """Every option's name."""

def default_arena_bytes(state_bytes: int, processes: int, bytes_owned: int) -> int:
    """See holdfast/staging.h."""

def new_attempt() -> str:
    """A random attempt id, 32 hex digits."""

class CheckpointReader:
    """An open checkpoint of one rank, or several."""

    @staticmethod
    def open(path: str, rank: int) -> CheckpointReader: ...

    @staticmethod
    def open_file(path: str) -> CheckpointReader: ...

    @staticmethod
    def open_manifest(path: str, manifest_name: str, digest: Digest | None = None) -> CheckpointReader: ...

    @staticmethod
    def open_places(path: str, files: Sequence[str], places: Sequence[tuple[str, str, Sequence[int], int, int, int]]) -> CheckpointReader: ...

    def tensors(self) -> list:
        """(name, dtype, shape, file, begin, end) of each."""

    def entry_bytes(self) -> dict:
        """
        The length of each tensor by its name; of two of one name the later one counts.
        """

    def add(self, rank: int) -> None:
        """
        Adds the tensors of another rank, which count before those of one name.
        """

    @property
    def files(self) -> list[str]: ...

    @property
    def step(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def attempt(self) -> str: ...

    def load(self, targets: Sequence[tuple[str, int, int, Device, int | None]], verify: bool, buffer_bytes: int, threads: int, engine: str, direct_io: bool) -> dict: ...

class RankAnnouncement:
    """Says to the other ranks of a save that this one has begun it."""

    def abandon(self, why: str) -> None:
        """This rank takes no part; not once its save has begun."""

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """
        Raises when one of them gives no signs of life, or any rank has failed.
        """

def announce_save(directory: str, name: str, attempt: str, rank: int, world_size: int, time_liveness_max: float | None) -> RankAnnouncement: ...

def digest(address: int, bytes: int) -> bytes:
    """XXH3-128 of bytes in host memory, 16 bytes."""

def digests(addresses: Sequence[int], sizes: Sequence[int]) -> bytes:
    """
    Digests of ranges of host memory, 16 bytes each, by several threads where there is much.
    """

def recover(directory: str, wait_for_orphans: float | None, promote: bool, clean_up: bool, silence_without_locks: float | None, age_without_locks: float | None) -> dict: ...

def saves_at_work(directory: str) -> str:
    """
    Who writes into a framework's directory: none, trainer, orphan, unknown.
    """

def list_checkpoints(directory: str) -> tuple:
    """The complete ones, and why others were passed over."""

def find_newest(directory: str) -> tuple:
    """The newest one, and why others were passed over."""

def remove_checkpoint(path: str, attempt: str) -> None:
    """Removes a checkpoint of that attempt as retention does."""

def select_for_removal(saved: Sequence[tuple[str, float, int, str, str]], keep_last: int, keep_every: int, name: str) -> list[str]:
    """
    Names that retention removes once the checkpoint `name` is there, oldest first.
    """

def find_abandoned(saved: Sequence[tuple[str, float, int, str, str]]) -> list[bool]:
    """
    Whether a rollback has abandoned each checkpoint: name, saved_at, step, attempt, parent.
    """

def file_manifests(directory: str, name: str) -> list[str]: ...

def remove_file(directory: str, name: str) -> None: ...

def inspect(path: str) -> dict: ...

class Digest:
    """XXH3-128 of a file."""

def make_commit_record(path: str, attempt: str, parent: str, world_size: int, name: str, contents: bytes) -> tuple:
    """Name and text of a commit record."""

def check_commit_file(path: str, attempt: str, name: str, contents: bytes) -> list[Digest] | None:
    """Digests of the manifests by rank; None without a commit record."""

def verify(path: str, threads: int, buffer_bytes: int, engine: str, direct_io: bool) -> dict: ...

JOB_TABLE_NAME: str = 'holdfast-job'

def read_save_in_flight(fd: int) -> dict:
    """What the job table behind `fd` shows."""

def read_ranks_waited_for(fd: int, attempt: str, world_size: int) -> list[int]:
    """The ranks whose part is not durable, by the rank board behind `fd`."""

def fail_at_exit() -> bool:
    """
    Makes the exit status 1 where it would be 0; returns whether the system allows it.
    """
