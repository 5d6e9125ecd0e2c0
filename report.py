"""What a run did: the glossary of its metrics, its statistics, its plots, its episodes as one HTML page.

    python report.py RUN                summary and RUN/plots.png
    python report.py RUN --html         also RUN/report.html: the newest episodes, to read from disk with no network
    python report.py RUN --compare B    paired difference of two runs on the tasks that both evaluated

Reads files only (config.json, metrics.jsonl, episodes/*.jsonl), never live objects: a dead run reports like a live one.
"""
import argparse
import base64
import hashlib
import html
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Metric(NamedTuple):
    """One name in metrics.jsonl. `volatile`: two equal runs may differ in it (time, memory, what followed from them)."""
    meaning: str
    unit: str
    volatile: bool = False


METRICS: dict[str, Metric] = {
    # one row a training step
    "step": Metric("training steps finished when the row was written; in an evaluation row, steps before it", "steps"),
    "reward_mean": Metric("mean reward of the valid episodes", "reward 0..1"),
    "reward_std": Metric("standard deviation of the reward over the valid episodes", "reward"),
    "outcome_counts": Metric("episodes by outcome: success, fail, truncated, too_many_errors, user_error, env_error",
                             "episodes"),
    "faults": Metric("episodes the world spoiled (user_error, env_error); they are out of every mean", "episodes"),
    "episodes": Metric("episodes collected, faulted ones included", "episodes"),
    "episodes_valid": Metric("episodes without a fault", "episodes"),
    "groups": Metric("groups collected: one task, G episodes", "groups"),
    "zero_variance_groups": Metric("groups dropped because all their rewards are equal: nothing to teach", "groups"),
    "do_nothing": Metric("reward that an agent which does nothing earns on the tasks of this step", "reward 0..1"),
    "turns_mean": Metric("policy turns per episode, mean", "turns"),
    "response_tokens": Metric("tokens that the policy sampled per episode, mean", "tokens"),
    "response_tokens_max": Metric("tokens that the policy sampled in the longest episode", "tokens"),
    "context_tokens": Metric("prompt and response tokens per episode, mean", "tokens"),
    "context_tokens_max": Metric("prompt and response tokens of the longest episode", "tokens"),
    "loss": Metric("loss summed over the step's micro-batches; null where no group had anything to teach", "nats"),
    "approx_kl": Metric("k3 estimate of KL(old || current) over the trained tokens", "nats/token"),
    "kl_ref": Metric("k3 estimate of KL(current || reference); null where no reference is used", "nats/token"),
    "clipfrac_low": Metric("share of trained tokens whose ratio was clipped from below", "share"),
    "clipfrac_high": Metric("share of trained tokens whose ratio was clipped from above", "share"),
    "tis_truncated": Metric("share of trained tokens whose importance weight was cut at tis_cap", "share"),
    "entropy": Metric("entropy of the policy at the trained tokens, mean", "nats/token"),
    "grad_norm": Metric("norm of the gradient before clipping; null where no update was made", "1"),
    "logp_gap_mean": Metric("mean |log-prob recomputed - log-prob at sampling|", "nats"),
    "logp_gap_max": Metric("largest |log-prob recomputed - log-prob at sampling|", "nats"),
    "lr": Metric("learning rate of the step", "1"),
    "trained_tokens": Metric("sampled tokens that entered the loss", "tokens"),
    "trained_episodes": Metric("episodes that entered the loss", "episodes"),
    "micro_batches": Metric("forward and backward passes of the update", "passes", True),
    "micro_batch_tokens": Metric("token budget of one micro-batch; halved after running out of memory", "tokens", True),
    "updates": Metric("optimizer steps taken in this training step", "steps"),
    "skipped_updates": Metric("updates skipped so far because loss or gradient was not finite", "updates"),
    "skipped": Metric("why this step made no update; null where it made one", "text"),
    "oom_retries": Metric("times that this step was redone with half the tokens after running out of memory",
                          "retries", True),
    "tokens_forwarded": Metric("real tokens that the rollout put through the model", "tokens"),
    "slots_forwarded": Metric("tokens and pads that the rollout put through the model", "tokens"),
    "decode_busy": Metric("share of decode slots that sampled a token of an unfinished turn", "share"),
    "rounds": Metric("rounds of the rollout: each lets every unfinished episode speak", "rounds"),
    "rollout_tokens_per_s": Metric("sampled tokens per second of rollout", "tokens/s", True),
    "rollout_s": Metric("time of the rollout", "s", True),
    "user_s": Metric("part of rollout_s spent waiting for the simulated user", "s", True),
    "env_s": Metric("part of rollout_s spent in the environment", "s", True),
    "update_s": Metric("time of the update", "s", True),
    "step_s": Metric("time of the whole step", "s", True),
    "rollout_peak_gib": Metric("peak GPU memory allocated in the rollout; null on a CPU", "GiB", True),
    "update_peak_gib": Metric("peak GPU memory allocated in the update; null on a CPU", "GiB", True),
    "vram_total_gib": Metric("memory of the card; null on a CPU", "GiB", True),
    "rss_gib": Metric("largest resident memory of the process so far", "GiB", True),
    # one row an evaluation, beside step
    "eval_mean_at_1": Metric("mean over tasks of a task's mean sampled reward, faulted episodes left out", "reward 0..1"),
    "eval_ci95": Metric("95 % bootstrap interval of eval_mean_at_1, resampling tasks", "reward, low and high"),
    "eval_greedy": Metric("mean reward at temperature 0, faulted episodes left out", "reward 0..1"),
    "eval_greedy_ci95": Metric("95 % bootstrap interval of eval_greedy, resampling tasks", "reward, low and high"),
    "eval_pass_hat_k": Metric("pass^k for k = 1, 2, ...: chance that k trials of a task all succeed, unbiased", "share"),
    "eval_do_nothing": Metric("reward that an agent which does nothing earns on the same tasks", "reward 0..1"),
    "eval_tasks": Metric("tasks with at least one episode without a fault", "tasks"),
    "eval_trials": Metric("sampled episodes per task that were asked for", "episodes"),
    "eval_faults": Metric("sampled episodes that the world spoiled", "episodes"),
    "eval_mean_faults_zero": Metric("eval_mean_at_1 with every faulted episode counted as reward 0", "reward 0..1"),
    "eval_outcome_counts": Metric("sampled episodes by outcome", "episodes"),
    "eval_s": Metric("time of the evaluation", "s", True),
    "user": Metric("who played the customer", "name"),
    "policy": Metric("which policy ran", "name"),
    "tau2_version": Metric("release of tau2: two releases have different tasks and rewards", "version"),
    "env": Metric("tau2 domain", "name"),
    "split": Metric("which tasks were evaluated", "name"),
    "tasks": Metric("where the tasks come from: tau2 or synthetic", "name"),
}
FAULT_OUTCOMES = ("user_error", "env_error")
OUTCOME_COLOURS = {"success": "#2a9d5c", "fail": "#d9a13b", "truncated": "#8f7fc0", "too_many_errors": "#c9602b",
                   "user_error": "#7a7a7a", "env_error": "#3d3d3d"}


# ---------------------------------------------------------------- rows: metrics.jsonl

def append_row(path: str | Path, row: dict) -> None:
    """Adds one line to metrics.jsonl. A name that METRICS does not list raises ValueError; NaN and inf become null."""
    unlisted = sorted(set(row) - set(METRICS))
    if unlisted:
        raise ValueError(f"not listed in report.METRICS: {', '.join(unlisted)}")
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(finite, allow_nan=False) + "\n")  # one write: a kill leaves at most one torn line
        file.flush()


def read_rows(path: str | Path) -> list[dict]:
    """All whole rows of a .jsonl file. A torn last line (the run was killed) is dropped; any other raises ValueError."""
    rows = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):  # a line that ends in a newline was written whole
                raise ValueError(f"{path} line {number} is not JSON: {error}") from None
    return rows


def drop_rows_after(path: str | Path, last_step: int) -> int:
    """For a resumed run: drops rows with a later step and a torn line, by writing aside and renaming. Returns how many."""
    path = Path(path)
    if not path.exists():
        return 0
    rows = read_rows(path)
    kept = [row for row in rows if row["step"] <= last_step]
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(aside, path)
    return len(rows) - len(kept)


# ---------------------------------------------------------------- statistics

def pass_hat_k(successes: int, trials: int, k: int) -> float:
    """Chance that k trials of one task all succeed, estimated without bias: C(successes, k) / C(trials, k).

    3 successes in 4 trials: pass^1 = 3/4, pass^2 = 3/6, pass^3 = 1/4, pass^4 = 0.
    Source: tau-bench, arXiv:2406.12045, section 3 (mean over tasks).
    """
    if not 1 <= k <= trials:
        raise ValueError(f"k = {k}: pass^k needs 1 <= k <= trials ({trials})")
    return math.comb(successes, k) / math.comb(trials, k)


def bootstrap_ci(per_task_means, seed: int = 0, resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of the mean over tasks: tasks are drawn again with replacement, trials stay with them.

    It says how far the number would move with other tasks of the same kind, not with another training seed.
    One task gives an interval of width 0, and few tasks one that is too narrow.
    """
    means = np.asarray(list(per_task_means), dtype=np.float64)  # (tasks,)
    if not len(means):
        raise ValueError("no task to take an interval of")
    picks = np.random.default_rng(seed).integers(len(means), size=(resamples, len(means)))
    low, high = np.quantile(means[picks].mean(1), [0.025, 0.975])
    return float(low), float(high)


def paired_difference(a: dict[str, float], b: dict[str, float], seed: int = 0) -> tuple[float, float, float]:
    """Mean of b - a over the tasks that both hold, with its 95 % bootstrap interval: (difference, low, high).

    Pairing takes the tasks' own difficulty out. a = {x: 0, y: 1}, b = {x: .5, y: 1, z: 0}: .25, z is left out.
    """
    common = sorted(set(a) & set(b))
    if not common:
        raise ValueError("the two runs have no evaluated task in common")
    differences = [b[task] - a[task] for task in common]
    return (float(np.mean(differences)), *bootstrap_ci(differences, seed))


def task_means(episodes: list[dict]) -> dict[str, float]:
    """Mean reward of each task over its episodes without a fault; a task with none is left out."""
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        if episode["outcome"] not in FAULT_OUTCOMES:
            rewards.setdefault(episode["task_id"], []).append(episode["reward"])
    return {task: float(np.mean(values)) for task, values in rewards.items()}


def eval_summary(episodes: list[dict], seed: int = 0) -> dict:
    """The statistics of one sampled evaluation, under the names of METRICS.

    Args:
        episodes: dicts with task_id, reward, outcome; any number of trials a task.
    Returns:
        eval_mean_at_1 and eval_ci95 (null if every episode faulted), eval_pass_hat_k {"1": ..., "2": ...} (mean over
        the tasks with at least k trials without a fault), eval_tasks, eval_faults, eval_mean_faults_zero,
        eval_outcome_counts.
    """
    means = task_means(episodes)
    outcomes = [episode["outcome"] for episode in episodes]
    zeroed = task_means([{**e, "reward": 0.0, "outcome": "fail"} if e["outcome"] in FAULT_OUTCOMES else e
                         for e in episodes])
    trials: dict[str, list[bool]] = {}
    for episode in episodes:
        if episode["outcome"] not in FAULT_OUTCOMES:  # success as tau2 has it: reward 1 within 1e-6
            trials.setdefault(episode["task_id"], []).append(abs(episode["reward"] - 1) <= 1e-6)
    most = max(map(len, trials.values()), default=0)
    pass_hat = {str(k): float(np.mean([pass_hat_k(sum(t), len(t), k) for t in trials.values() if len(t) >= k]))
                for k in range(1, most + 1)}
    return {"eval_mean_at_1": float(np.mean(list(means.values()))) if means else None,
            "eval_ci95": list(bootstrap_ci(means.values(), seed)) if means else None,
            "eval_pass_hat_k": pass_hat, "eval_tasks": len(means),
            "eval_faults": sum(outcome in FAULT_OUTCOMES for outcome in outcomes),
            "eval_mean_faults_zero": float(np.mean(list(zeroed.values()))) if zeroed else None,
            "eval_outcome_counts": {name: outcomes.count(name) for name in dict.fromkeys(outcomes)}}


def last_evaluation(run_dir: str | Path) -> tuple[dict, dict[str, float]]:
    """The newest evaluation of a run: (its metrics row, mean reward by task from its episode file)."""
    rows = [row for row in read_rows(Path(run_dir) / "metrics.jsonl") if "eval_mean_at_1" in row]
    files = sorted(Path(run_dir).glob("episodes/eval_*_sampled.jsonl"))
    if not rows or not files:
        raise FileNotFoundError(f"{run_dir} holds no evaluation: run train.py with --eval-every or --eval-only")
    return rows[-1], task_means(read_rows(files[-1]))


# ---------------------------------------------------------------- plots

def plot_run(run_dir: str | Path) -> Path:
    """Draws run_dir/plots.png from metrics.jsonl; written aside and renamed, so that a kill leaves the plot before."""
    from matplotlib.figure import Figure  # here, because it costs a second; no pyplot, so no backend and no state
    run_dir = Path(run_dir)
    rows = read_rows(run_dir / "metrics.jsonl")
    evals = [row for row in rows if row.get("eval_mean_at_1") is not None]

    def points(name: str) -> tuple[list, list]:
        kept = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        return [step for step, _ in kept], [value for _, value in kept]

    figure = Figure(figsize=(13.5, 7.2), dpi=110, layout="constrained")
    reward, memory, lengths, outcome, gap, signal = figure.subplots(2, 3).flat
    lines = [(reward, "reward_mean", "train", "#a9c6e8"), (reward, "do_nothing", "do nothing, train tasks", "#cccccc"),
             (memory, "rollout_peak_gib", "rollout, GPU", "#2f6db3"), (memory, "update_peak_gib", "update, GPU", "#c9602b"),
             (memory, "rss_gib", "process, main memory", "#8a8a8a"), (memory, "vram_total_gib", "the card", "#000000"),
             (lengths, "context_tokens", "whole episode, mean", "#8a8a8a"),
             (lengths, "response_tokens", "sampled, mean", "#2f6db3"),
             (lengths, "response_tokens_max", "sampled, longest", "#a9c6e8"),
             (gap, "logp_gap_max", "largest", "#c9602b"), (gap, "logp_gap_mean", "mean", "#2f6db3")]
    for axis, name, label, colour in lines:
        steps, values = points(name)
        if name.startswith("logp_gap"):
            values = np.maximum(values, 1e-9)  # an exact 0 has no place on a log axis
        if steps:
            axis.plot(steps, values, color=colour, label=label, marker="." if len(steps) < 40 else None,
                      linestyle="--" if name in ("do_nothing", "vram_total_gib") else "-")
    steps, values = points("reward_mean")
    if len(steps) >= 10:
        width = max(5, len(steps) // 20)
        smooth = [np.mean(values[max(0, i - width + 1):i + 1]) for i in range(len(values))]
        reward.plot(steps, smooth, color="#2f6db3", label=f"train, mean of {width} steps")
    if evals:
        steps, means = points("eval_mean_at_1")
        low, high = np.array([row["eval_ci95"] for row in evals]).T
        reward.errorbar(steps, means, [means - low, high - means], color="#c9602b", marker="o", capsize=3,
                        label="validation, sampled, 95 % over tasks")
        reward.plot(*points("eval_greedy"), color="#c9602b", marker="x", linestyle=":", label="validation, greedy")
        reward.plot(*points("eval_do_nothing"), color="#000000", linestyle="--", label="do nothing, validation")
    steps, counts = points("outcome_counts")
    bottom = np.zeros(len(steps))
    for name, colour in OUTCOME_COLOURS.items():
        share = np.array([count.get(name, 0) / max(sum(count.values()), 1) for count in counts])
        if share.any():
            outcome.bar(steps, share, 1.0, bottom=bottom, color=colour, label=name)
            bottom += share
    signal.bar(*points("groups"), 1.0, color="#e3edf8", label="groups")
    signal.bar(*points("zero_variance_groups"), 1.0, color="#b5b5b5", label="of them equal rewards: nothing to teach")
    for axis, title, unit in ((reward, "Reward", "reward"), (memory, "Peak memory", "GiB"),
                              (lengths, "Length of an episode", "tokens"), (outcome, "Outcomes", "share of episodes"),
                              (gap, "Log-prob: recomputed against sampled", "nats"), (signal, "Groups", "groups a step")):
        axis.set(title=title, ylabel=unit, xlabel="step", yscale="log" if axis is gap else "linear")
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if axis is not gap:
            axis.set_ylim(bottom=0)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, framealpha=0.85)
    figure.suptitle(describe_run(run_dir), fontsize=11)
    figure.savefig(run_dir / ".plots.tmp.png")
    os.replace(run_dir / ".plots.tmp.png", run_dir / "plots.png")
    return run_dir / "plots.png"


def describe_run(run_dir: Path) -> str:
    """One line that names what a number needs to mean anything: policy, user, tau2 release, split."""
    rows = read_rows(run_dir / "metrics.jsonl")
    config = json.loads((run_dir / "config.json").read_text()) if (run_dir / "config.json").exists() else {}
    named = {**config, **{k: v for row in rows for k, v in row.items()}}
    words = [f"{label} {named[key]}" for key, label in (("policy", "policy"), ("env", "env"), ("tasks", "tasks"),
             ("split", "split"), ("user", "user"), ("tau2_version", "tau2")) if named.get(key) is not None]
    return f"{run_dir.name}: " + ", ".join(words)


# ---------------------------------------------------------------- episodes as HTML

PAGE_STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:1.5em auto;max-width:75em;padding:0 1em;color:#222}
img{max-width:100%}details{border:1px solid #ddd;border-radius:6px;margin:.4em 0;padding:.3em .7em}
summary{cursor:pointer}pre,.turn{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate}
.turn{margin:.4em 0;padding:.3em .7em;border-left:4px solid #bbb;background:#f7f7f7}
.assistant{border-color:#2f6db3;background:#edf4fc}.user{border-color:#2a9d5c;background:#eef8f1}
.tool{font-family:ui-monospace,monospace;font-size:12px}.role{font-weight:600;margin-right:.6em}
.tokens{font:12px/1.6 ui-monospace,monospace}mark{background:#ffe08a;outline:1px solid #eac04a55}
.outcome{color:#fff;border-radius:4px;padding:0 .5em}select{margin-right:1em}"""
PAGE_SCRIPT = """const pick=[...document.querySelectorAll('select')],rows=[...document.querySelectorAll('.episode')];
function show(){let n=0;for(const r of rows){r.hidden=pick.some(s=>s.value!==''&&r.dataset[s.id]!==s.value);n+=!r.hidden}
document.getElementById('count').textContent=n}
pick.forEach(s=>s.addEventListener('change',show));show()"""


def write_html(run_dir: str | Path, limit: int = 200) -> Path:
    """Writes run_dir/report.html: plot, metrics and the newest `limit` episodes in one file that needs no network.

    Everything that a model, a user or a tool wrote is escaped, and the page's own policy (CSP) allows no script
    but the filter below, by its hash, and no request at all.
    """
    run_dir = Path(run_dir)
    files = sorted((run_dir / "episodes").glob("*.jsonl"), key=lambda p: p.stem.split("_")[1], reverse=True)
    episodes = [(path.stem, episode) for path in files for episode in read_rows(path)]
    shown = episodes[:limit]
    script_hash = base64.b64encode(hashlib.sha256(PAGE_SCRIPT.encode()).digest()).decode()
    csp = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'"
    picture = base64.b64encode(plot_run(run_dir).read_bytes()).decode()
    choices = {"outcome": {e["outcome"] for _, e in shown}, "task": {e["task_id"] for _, e in shown},
               "file": {name for name, _ in shown}}
    filters = "".join(f'<label>{key} <select id="{key}"><option value="">all</option>' + "".join(
        f"<option>{html.escape(value)}</option>" for value in sorted(values)) + "</select></label>"
        for key, values in choices.items())
    page = (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
            f'content="{csp}"><title>{html.escape(run_dir.name)}</title><style>{PAGE_STYLE}</style></head><body>'
            f'<h1>{html.escape(describe_run(run_dir))}</h1><img alt="plots" src="data:image/png;base64,{picture}">'
            f'<h2>Episodes</h2><p>{len(shown)} newest of {len(episodes)}; <mark>marked</mark> tokens were sampled by '
            f'the policy.</p><p>{filters}<span id="count">{len(shown)}</span> shown</p>'
            + "".join(episode_html(name, episode) for name, episode in shown)
            + f"<script>{PAGE_SCRIPT}</script></body></html>")
    aside = run_dir / ".report.tmp.html"
    aside.write_text(page, encoding="utf-8", errors="backslashreplace")  # a lone surrogate must not stop the page
    os.replace(aside, run_dir / "report.html")
    return run_dir / "report.html"


def episode_html(file_name: str, episode: dict) -> str:
    """One <details> block: conversation, tool calls and results, tokens with the sampled ones marked, reward."""
    safe = html.escape
    turns = []
    for message in episode["messages"]:
        calls = "".join(f"\n→ {call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"
                        for call in message.get("tool_calls") or [])
        who = message["role"] + (f" {message['name']}" if message.get("name") else "")
        turns.append(f'<div class="turn {safe(message["role"])}"><span class="role">{safe(who)}</span>'
                     f'{safe((message.get("content") or "") + calls)}</div>')
    tokens = "".join(f"<mark>{safe(text)}</mark>" if sampled else safe(text)
                     for text, sampled in episode.get("tokens") or [])
    reward_info = episode.get("reward_info") or {}
    parts = ", ".join(f"{name} {value}" for name, value in (reward_info.get("reward_breakdown") or {}).items())
    colour = OUTCOME_COLOURS.get(episode["outcome"], "#000")
    fault = f'<p><b>fault</b> {safe(str(episode["fault"]))}</p>' if episode.get("fault") else ""
    return (f'<details class="episode" data-outcome="{safe(episode["outcome"])}" data-task="{safe(episode["task_id"])}" '
            f'data-file="{safe(file_name)}"><summary><span class="outcome" style="background:{colour}">'
            f'{safe(episode["outcome"])}</span> task {safe(episode["task_id"])}, reward {episode["reward"]:g}'
            f'{safe(f" ({parts})" if parts else "")}, {episode["turns"]} turns, {sum(episode["response_mask"])} sampled '
            f'tokens, {safe(file_name)} #{episode["sibling"]}</summary>{fault}{"".join(turns)}'
            f'<details><summary>reward breakdown</summary><pre>{safe(json.dumps(reward_info, indent=1))}</pre></details>'
            f'<details><summary>tokens</summary><div class="turn tokens">{tokens}</div></details></details>\n')


# ---------------------------------------------------------------- command line

def compare_runs(run_a: Path, run_b: Path) -> str:
    """The newest evaluations of two runs, and b - a over the tasks that both have."""
    lines, means = [], []
    for run in (run_a, run_b):
        row, by_task = last_evaluation(run)
        means.append(by_task)
        lines.append(f"{describe_run(run)}; step {row['step']}: mean@1 {row['eval_mean_at_1']:.3f} {row['eval_ci95']}")
    difference, low, high = paired_difference(*means)
    common = len(set(means[0]) & set(means[1]))
    verdict = "the interval holds 0: no difference shown" if low <= 0 <= high else "the interval leaves out 0"
    return "\n".join([*lines, f"B - A over {common} common tasks: {difference:+.3f}, "
                      f"95 % [{low:+.3f}, {high:+.3f}] ({verdict})"])


def report_main() -> None:
    parser = argparse.ArgumentParser(description="Report on a run folder of train.py.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--html", action="store_true", help="also write RUN/report.html with the newest episodes")
    parser.add_argument("--limit", type=int, default=200, help="most episodes on the page")
    parser.add_argument("--compare", type=Path, help="another run folder: paired difference on common tasks")
    args = parser.parse_args()
    try:
        print(compare_runs(args.run, args.compare) if args.compare else describe_run(args.run))
        print(plot_run(args.run))
        if args.html:
            print(write_html(args.run, args.limit))
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))  # one line, exit code 2


if __name__ == "__main__" and "__file__" in globals():
    report_main()
