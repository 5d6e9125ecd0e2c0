"""machine.py and what hangs on it: the first command where Unix is missing, and a card that torch cannot use."""
import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import machine
from report import read_rows
from run_folder import interrupt_later

ROOT = Path(__file__).resolve().parent.parent
FIRST_COMMAND = ["--env", "retail", "--steps", "1", "--tasks-per-step", "2", "--group-size", "2", "--eval-tasks", "2",
                 "--max-turns", "4"]

# What a Windows machine lacks, put in place before train.py is imported. Files of /proc are gone, text files are
# cp1252 unless somebody says otherwise, folders cannot be opened, a read-only file cannot be flushed, and a rename
# does not overwrite. psutil gives what it gives there, as its documentation lists it: rss and peak_wset.
WINDOWS = '''
import builtins, collections, io, os, pathlib, psutil, runpy, sys
sys.modules["resource"] = None
real_open, real_os_open, real_stat, real_fsync, real_rename = open, os.open, os.stat, os.fsync, os.rename
memory = psutil.virtual_memory()
Memory = collections.namedtuple("Memory", "rss peak_wset")
class Process:
    def __init__(self, pid=None): pass
    def memory_info(self): return Memory(2**28, 2**29)
psutil.Process, psutil.virtual_memory = Process, lambda: memory
refused = []
def of_proc(path): return isinstance(path, (str, os.PathLike)) and str(path).startswith("/proc")
def windows_open(file, mode="r", buffering=-1, encoding=None, *rest, **options):
    if of_proc(file):
        raise FileNotFoundError(2, "no /proc", str(file))
    if "b" not in mode and encoding in (None, "locale"):
        encoding = "cp1252"
    return real_open(file, mode, buffering, encoding, *rest, **options)
flags_of = {}
def windows_os_open(path, flags, *rest, **options):
    if of_proc(path):
        raise FileNotFoundError(2, "no /proc", str(path))
    if os.path.isdir(path):
        refused.append(str(path))
        raise PermissionError(13, "a folder cannot be opened", str(path))
    handle = real_os_open(path, flags, *rest, **options)
    flags_of[handle] = flags
    return handle
def windows_fsync(handle):
    if isinstance(handle, int) and flags_of.get(handle, os.O_RDWR) & 3 == os.O_RDONLY:
        raise OSError(9, "not open for writing")
    real_fsync(handle)
def windows_rename(source, target, **options):
    if os.path.exists(target):
        raise FileExistsError(17, "exists", str(target))
    real_rename(source, target, **options)
def windows_stat(path, *rest, **options):
    if of_proc(path):
        raise FileNotFoundError(2, "no /proc", str(path))
    return real_stat(path, *rest, **options)
builtins.open = io.open = windows_open
os.open, os.fsync, os.rename, os.stat = windows_os_open, windows_fsync, windows_rename, windows_stat
del os.sysconf
sys.path.insert(0, os.getcwd())
sys.argv = ["train.py", *sys.argv[1:]]
try:
    runpy.run_path("train.py", run_name="__main__")
finally:
    print("folders refused:", len(refused))
'''


def run_python(code: str, arguments: list[str], **extra) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONUTF8": "0"} | extra
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True,
                          env=environment, encoding="cp1252", timeout=300)


def test_the_first_command_runs_without_unix(tmp_path):
    """`import resource`, fsync of a folder or a file read in the system's code page ended the first command on
    Windows. What the simulation takes away is really missing: the folders' refusals are counted."""
    run = tmp_path / "run"
    done = run_python(WINDOWS, FIRST_COMMAND + ["--run-dir", str(run)], PYTHONIOENCODING="cp1252")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "folders refused: 0" not in done.stdout and "folders refused:" in done.stdout
    trained = [row for row in read_rows(run / "metrics.jsonl") if "reward_mean" in row]
    assert [(row["step"], row["rss_gib"]) for row in trained] == [(1, 0.5)]  # psutil's peak_wset
    assert (run / "policy" / "model.safetensors").is_file() and (run / "plots.png").is_file()


def is_text_mode(call: ast.Call, mode_place: int) -> bool:
    """Whether an `open` call is one of a text file; a mode that is not written out counts as text."""
    modes = call.args[mode_place:mode_place + 1] + [k.value for k in call.keywords if k.arg == "mode"]
    return not any("b" in str(getattr(mode, "value", "")) for mode in modes)


def test_every_text_file_names_its_encoding():
    """One `open` without an encoding turns a customer's name into two letters on Windows, or stops the run there."""
    looked_at = 0
    for path in [*ROOT.glob("*.py"), *ROOT.glob("tiny/*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            is_method = isinstance(call.func, ast.Attribute)
            name = call.func.attr if is_method else getattr(call.func, "id", "")
            module = getattr(getattr(call.func, "value", None), "id", "")
            if name not in ("open", "read_text", "write_text") or module in ("os", "tarfile", "zipfile"):
                continue
            if name == "open" and not is_text_mode(call, 0 if is_method else 1):
                continue
            looked_at += 1
            by_place = {"read_text": 1, "write_text": 2}.get(name, 9) <= len(call.args)
            assert by_place or any(k.arg == "encoding" for k in call.keywords), f"{path.name}:{call.lineno}"
    assert looked_at > 15


def planted(release: str, tmp_path: Path) -> str:
    """Code that makes machine.py see a driver's file with this release, and train.py run after it."""
    folder = tmp_path / "nvidia"
    folder.mkdir(exist_ok=True)
    (folder / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {release}  Tue Jan 2\n")
    return ("import sys; sys.path.insert(0, '.'); import machine, train; "
            f"machine.DRIVER_SIGNS = {{'NVIDIA': (({str(folder / 'version')!r},), 'no-such-tool')}}; "
            "sys.exit(train.main(sys.argv[1:]))")


def test_a_card_that_torch_cannot_use_is_said(tmp_path):
    """A card behind an old driver looked like no card at all: the small policy ran, and nobody was told why."""
    code = planted("550.54.15", tmp_path)
    arguments = FIRST_COMMAND + ["--eval-every", "0", "--run-dir", str(tmp_path / "run")]
    done = run_python(code, arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    first = done.stdout.splitlines()[0]
    assert first.startswith("policy: tiny (the small policy, since an NVIDIA card is here (version, driver 550.54.15)")
    assert "torch 2." in first and "was built for" in first and "another build of torch fits" in first
    refused = run_python(code, ["--device", "cuda", "--run-dir", str(tmp_path / "no")])
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
    words = first.partition("since ")[2].removesuffix(")")
    assert words in refused.stderr, (words, refused.stderr)


def test_a_tool_on_the_path_is_a_sign_too(tmp_path, monkeypatch):
    """On Windows and WSL there are no driver files under /proc or /dev: nvidia-smi on the search path is what shows."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setattr(machine, "DRIVER_SIGNS", {"NVIDIA": ((), "nvidia-smi"), "AMD": ((), "rocm-smi")})
    monkeypatch.setattr(machine, "usable_cards", lambda: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "an NVIDIA card is here (nvidia-smi)" in machine.unseen_card()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose: nothing to say
    assert machine.unseen_card() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(machine, "usable_cards", lambda: ["cuda:0"])
    assert machine.unseen_card() is None


@pytest.mark.parametrize("cuda, hip, words", [("13.0", None, "built for CUDA 13.0"), (None, "6.4", "ROCm 6.4"),
                                              (None, None, "for CPUs only")])
def test_what_torch_was_built_for(monkeypatch, cuda, hip, words):
    """The one thing that a user with a card in vain must know, and `pip list` does not tell."""
    monkeypatch.setattr(machine.torch.version, "cuda", cuda)
    monkeypatch.setattr(machine.torch.version, "hip", hip)
    assert words in machine.torch_build()


def test_a_driver_that_is_too_old_counts_no_card(monkeypatch, recwarn):
    """torch.cuda.device_count asks the driver's own library and counts cards that torch then fails on."""
    def old():
        import warnings
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old")
        return False
    monkeypatch.setattr(machine.torch.cuda, "is_available", old)
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 1)
    assert machine.usable_cards() == [] and not recwarn.list


def test_an_ignored_ctrl_c_stays_ignored():
    """A run in the background of a shell ignores SIGINT; the update put a handler there, and one Ctrl-C meant for
    another program ended it."""
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupt_later():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            with interrupt_later():
                os.kill(os.getpid(), signal.SIGINT)  # held back, not lost
    finally:
        signal.signal(signal.SIGINT, before)


def test_peak_memory_is_the_systems_own_figure():
    """KiB taken for bytes, or what is resident now for the peak: 64 MiB that came and went must show."""
    before = machine.peak_rss_bytes()
    block = b"x" * (before + 2**26 - machine.psutil.Process().memory_info().rss)
    del block
    after = machine.peak_rss_bytes()
    assert 2**25 < after - before < 2**28
    status = Path("/proc/self/status")
    if status.exists():
        high = int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
        assert abs(after - high) < 2**23
