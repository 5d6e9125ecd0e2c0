"""What a machine has and lacks: peak memory, files on disk for certain, and a card that torch cannot use.

Everything that differs between Linux, macOS and Windows stands here, so that no other room asks which system it is on.
"""
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import psutil
import torch

# Where a card's driver shows: its files (Linux), or its tool on the search path (Windows, WSL).
DRIVER_SIGNS = {
    "NVIDIA": (("/proc/driver/nvidia/version", "/dev/nvidiactl"), "nvidia-smi"),
    "AMD": (("/dev/kfd",), "rocm-smi"),
}


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes; where no system call tells it, what is resident now."""
    try:
        import resource  # here, because Windows has none
    except ImportError:
        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)  # peak_wset: Windows
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now, in bytes: of the card, with what torch's allocator keeps unused; else main."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def out_of_memory(fault: BaseException) -> bool:
    """Whether an exception says that memory ran out; torch has a class for cards, and only words for a CPU."""
    if isinstance(fault, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(fault, RuntimeError) and "allocate memory" in str(fault)


def sync_paths(paths: list[Path]) -> None:
    """Waits until files, and the lists of names that folders are, have reached the disk.

    Windows opens no folder and keeps names by itself; it wants a file that it flushes open for writing.
    """
    for path in paths:
        is_folder = path.is_dir()
        try:
            handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        except PermissionError:
            if is_folder:
                continue
            raise
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def usable_cards() -> list[str]:
    """["cuda:0", ...]: the cards that torch can compute on (a driver that is too old is counted by torch, too)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an old driver in a paragraph; unseen_card says it in a line
        if not torch.cuda.is_available():
            return []
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def unseen_card() -> str | None:
    """One line about a card that is in this machine while torch can use none; None where there is nothing to say."""
    if usable_cards():
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # hidden on purpose
        return None
    for maker, (files, tool) in DRIVER_SIGNS.items():
        sign = next((file for file in files if Path(file).exists()), shutil.which(tool))
        if sign:
            return (f"an {maker} card is here ({Path(sign).name}{driver_release(Path(sign))}) that torch cannot use: "
                    f"{torch_build()}; another build of torch fits other cards and older drivers "
                    '(README, "Installing for a GPU")')
    return None


def driver_release(sign: Path) -> str:
    """", driver 550.54.15" where the driver's version file says so, else nothing."""
    if sign.name != "version":
        return ""
    found = re.search(r"\s(\d+\.\d[\d.]*)\s", sign.read_text(encoding="utf-8", errors="replace"))
    return f", driver {found[1]}" if found else ""


def torch_build() -> str:
    """What this torch was built for, in words."""
    if torch.version.cuda:
        return f"torch {torch.__version__} was built for CUDA {torch.version.cuda} and wants a driver that knows it"
    if torch.version.hip:
        return f"torch {torch.__version__} was built for AMD's ROCm {torch.version.hip}"
    return f"torch {torch.__version__} was built for CPUs only"
