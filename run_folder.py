"""What keeps a run alive: its folder, resume, interrupts that wait, memory that runs out.

    runs/NAME/config.json      the resolved Config
              metrics.jsonl    one row a training step, one an evaluation (report.METRICS)
              episodes/        every conversation, with its tokens
              ckpt_*/          weights, moments, state: what --resume goes on from
              policy/          the trained policy, loadable by name
              policy_best/     the one that did best in an evaluation, and at which step

The loop itself is train.py's; nothing here knows what a reward or an advantage is.
"""
import dataclasses
import gc
import json
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from machine import out_of_memory, peak_rss_bytes
from model import latest_checkpoint, load_checkpoint, save_policy
from report import best_evaluation, plot_run, read_rows

FIXED_ON_RESUME = ("env", "split", "tasks", "model", "lora_rank", "dtype", "attn", "seed",
                   "group_size", "tasks_per_step", "user", "loss", "temperature")


PLOT_EVERY_S = 30.0  # a plot takes 0.5 to 4 s, a step of the small policy 6


class BadInput(ValueError):
    """The command line, a file or an installation is at fault, not the code: one line, exit 2."""


class RunStopped(RuntimeError):
    """The run cannot go on by itself (faults, non-finite updates, full disk): one line, exit 1."""


def read_config(run_dir: Path, config_class: type):
    """The Config that a run was started with.

    Args:
        config_class: train.Config, handed in, since this room does not know the loop.
    Raises: BadInput where there is no config.json, or one that is not a run's.
    """
    path = run_dir / "config.json"
    if not path.is_file():
        raise BadInput(f"--resume {run_dir}: no config.json there; "
                       "give the folder of a run, such as runs/NAME")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return config_class(**saved)
    except (ValueError, TypeError) as fault:
        raise BadInput(f"{path} is not the config of a run: {fault}") from fault


def write_config(cfg, run_dir: Path) -> None:
    """config.json, written aside and renamed: a kill leaves the old one or the new one."""
    saved = dataclasses.asdict(cfg) | {"resume": None, "run_dir": str(run_dir)}
    aside = run_dir / "config.json.tmp"
    aside.write_text(json.dumps(saved, indent=1), encoding="utf-8")
    aside.replace(run_dir / "config.json")


def open_run(cfg, world: dict) -> tuple[Path, int, dict]:
    """The run folder, the first step to do, and the state of the checkpoint it goes on from."""
    if cfg.resume:
        return resume_run(cfg, world)
    run_dir = Path(cfg.run_dir or f"runs/{cfg.env}-{time.strftime('%Y%m%d-%H%M%S')}")
    if (run_dir / "config.json").exists():
        raise BadInput(f"--run-dir {run_dir} holds a run already; "
                       f"use --resume {run_dir} or another folder")
    if run_dir.exists() and any(run_dir.iterdir()):
        raise BadInput(f"--run-dir {run_dir} is not empty; give a new folder")
    run_dir.mkdir(parents=True, exist_ok=True)
    write_config(cfg, run_dir)
    (run_dir / "metrics.jsonl").touch()
    return run_dir, 0, {}


def resume_run(cfg, world: dict) -> tuple[Path, int, dict]:
    """Puts weights, moments and random state of the newest whole checkpoint back.

    Rows of steps after that checkpoint are dropped: those steps are done again.
    """
    run_dir = Path(cfg.resume)
    checkpoint = latest_checkpoint(run_dir)
    say_what_changes(read_config(run_dir, type(cfg)), cfg)
    state = load_checkpoint(checkpoint, world["policy"].model, world["optimizer"])
    if cfg.eval_only:  # measured where it stands; the run's own files stay, but for the new row
        return run_dir, state["step"], state
    if cfg.steps < state["step"]:
        raise BadInput(f"--steps {cfg.steps}: {run_dir} has done {state['step']} already")
    torch.set_rng_state(state["torch_rng"])
    for group in world["optimizer"].param_groups:
        group["lr"] = cfg.lr  # the typed value wins over the stored one
    metrics_file = run_dir / "metrics.jsonl"
    metrics_file.touch()
    rows = [r for r in read_rows(metrics_file) if r["step"] <= state["step"]]
    has_row = any(r["step"] == state["step"] and "reward_mean" in r for r in rows)
    if state["row"] and not has_row:
        rows.append(state["row"])  # killed between checkpoint and row
    aside = run_dir / "metrics.jsonl.tmp"
    aside.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    aside.replace(metrics_file)
    write_config(cfg, run_dir)
    print(f"resume: {checkpoint.name}, going on from step {state['step']}")
    return run_dir, state["step"], state


def say_what_changes(before, now) -> None:
    """Prints each flag that differs from the resumed run's.

    Raises: BadInput for one that would make it another run.
    """
    for field in dataclasses.fields(now):
        if field.name in ("resume", "run_dir"):
            continue
        flag = "--" + field.name.replace("_", "-")
        old = getattr(before, field.name)
        new = getattr(now, field.name)
        if old == new:
            continue
        if field.name in FIXED_ON_RESUME:
            raise BadInput(f"--resume {now.resume}: {flag} was {old!r}, now {new!r}; "
                           "that would be another run, so start a new one")
        print(f"resume: {flag} changes from {old!r} to {new!r}")


def keep_best(run_dir: Path, policy, row: dict) -> None:
    """Saves the policy as run_dir/policy_best if its evaluation `row` is the best so far; of equals the first stays.

    Written before the row is: a run killed in between measures, and saves, again. A stored one of this or a later
    step is from before a resume.
    """
    score = row["eval_mean_at_1"]
    best = best_evaluation(run_dir)
    if score is None or (best and best["step"] < row["step"] and best["eval_mean_at_1"] >= score):
        return
    save_policy(run_dir / "policy_best", policy, note={"step": row["step"], "eval_mean_at_1": score})


class Plotter:
    """Draws a run's plots.png, but not more often than every PLOT_EVERY_S seconds unless it must be `now`."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.drawn_at = time.monotonic()

    def draw(self, now: bool = False) -> None:
        if now or time.monotonic() - self.drawn_at >= PLOT_EVERY_S:
            plot_run(self.run_dir)
            self.drawn_at = time.monotonic()


def save_episodes(path: Path, episodes: list, tokenizer) -> None:
    """One JSON object a line: the Episode, and its text in runs of sampled or given tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with open(aside, "w", encoding="utf-8") as file:
        for episode in episodes:
            row = dataclasses.asdict(episode) | {"tokens": token_runs(episode, tokenizer)}
            file.write(json.dumps(row, default=str) + "\n")
    aside.replace(path)


def token_runs(episode, tokenizer) -> list[list]:
    """[text, 1 where the policy sampled it, else 0] for each run of such tokens, in order."""
    ids = episode.prompt_ids + episode.response_ids
    mask = [0] * len(episode.prompt_ids) + episode.response_mask
    changes = [t for t in range(1, len(ids)) if mask[t] != mask[t - 1]]
    cuts = [0] + changes + [len(ids)]
    return [[tokenizer.decode(ids[a:b]), mask[a]] for a, b in zip(cuts, cuts[1:]) if a < b]


def within_memory(limit: list[int], floor: int, what: str, call):
    """call(limit[0]); when memory runs out, the limit is halved for good and the call made again.

    Update: tokens of a micro-batch; the gradient is the same, and nothing is left behind when
    it fails. (A rollout keeps what it has and goes on with fewer rows by itself.)
    """
    while True:
        try:
            return call(limit[0])
        except (RuntimeError, MemoryError) as fault:
            if not out_of_memory(fault):
                raise
            if limit[0] // 2 < floor:
                raise RunStopped(f"out of memory with {limit[0]} {what}; try a smaller "
                                 "--max-context, --max-new-tokens or --group-size") from fault
        gc.collect()  # outside the except clause, where the traceback holds no tensors any more
        limit[0] //= 2
        print(f"out of memory; from now on at most {limit[0]} {what}", flush=True)


def memory_gib(device: torch.device) -> dict:
    """Peak VRAM since the last call, the card's total, and the process' peak resident memory.

    VRAM is null on a CPU.
    """
    rss = peak_rss_bytes() / 2**30
    if device.type != "cuda":
        return {"vram": None, "total": None, "rss": round(rss, 3)}
    peak = torch.cuda.max_memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.reset_peak_memory_stats(device)
    return {"vram": round(peak / 2**30, 3), "total": round(total / 2**30, 3), "rss": round(rss, 3)}


@contextmanager
def interrupt_later():
    """Hold Ctrl-C back while weights, rows and checkpoint change together, then raise it.

    Where the shell started the run with Ctrl-C ignored (nohup, a background job), it stays ignored.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield
        return
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
