"""Train a tool-using agent on tau2-bench with GRPO: act, judge, compare, learn, report. One process, one file of loop.

    python train.py --env retail              # one GPU: a real checkpoint; a laptop: the small policy that ships
    python train.py --resume runs/NAME        # carry on after a kill, a crash or Ctrl-C
    python train.py --eval-only               # measure only

Kept of GRPO (DeepSeekMath, arXiv:2402.03300): groups of siblings as the baseline, clipped ratios, optional KL.
Dropped: the critic, the reward model (tau2's verifiable reward takes its place), process supervision.

Dimensions: P tasks a step, G group size, B = P * G episodes, T tokens of a row.
"""
import dataclasses
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers.utils import logging as transformers_logging

from attention import pack_layout
from chat import load_chat
from grpo import WideAdamW, group_advantages, update_policy
from model import enable_checkpointing, load_policy, save_checkpoint, save_policy
from report import append_row, best_line, eval_summary, read_rows
from rollout import Row, collect, generate_turns, limit_rows, to_batch
from run_folder import BadInput, RunStopped, interrupt_later, memory_gib, within_memory
from run_folder import Plotter, keep_best, open_run, read_config, save_episodes
from tiny.tasks_retail import make_tasks
from user_scripted import ScriptedUser
from users import LLMUser, PolicyUser, ReplayUser

try:
    from env_tau2 import Tau2Env, do_nothing_reward, domain_tasks, needs_judge, tau2_version
except ImportError as tau2_fault:
    if __name__ != "__main__":
        raise
    print(f"train.py: {tau2_fault}", file=sys.stderr)
    sys.exit(2)

ALLOWED = {
    "env": ("retail", "airline", "telecom", "mock"),
    "split": ("train", "test", "base", "train_clean", "test_clean"),
    "tasks": ("auto", "tau2", "synthetic"),
    "user": ("scripted", "policy", "llm", "replay"),
    "loss": ("grpo", "dr_grpo", "dapo", "gspo", "cispo"),
    "dtype": (None, "float32", "bfloat16"),
    "attn": ("sinkflex", "eager", "sdpa"),
    "choose_tasks": ("epochs", "mixed"),
}
LEAST = {"group_size": 2, "tasks_per_step": 1, "max_context": 1, "max_turns": 1, "max_new_tokens": 1, "eval_tasks": 1,
         "oversample": 1, "updates_per_step": 1,
         "checkpoint_every": 1, "eval_trials": 1, "eval_every": 0, "steps": 0, "lr": 0, "kl_coef": 0, "lora_rank": 0}


@dataclass(frozen=True)
class Config:
    """Everything a run depends on. "(by policy)": None here, filled by `resolve` from PRESETS."""

    env: str = "retail"  # tau2 domain: retail, airline, telecom or mock
    split: str = "train"  # train, test, base, train_clean or test_clean (clean: no tasks that pay for doing nothing)
    tasks: str = "auto"  # tau2: tau2's own; synthetic: generated retail tasks; auto: synthetic for the small policy
    model: str = "auto"  # hub name or folder; auto: what fits the machine, else the small policy in tiny/policy
    user: str = "scripted"  # who plays the customer: scripted, policy (the policy's own frozen base), llm or replay
    user_model: str | None = None  # model name for --user llm (any OpenAI-compatible endpoint)
    user_base_url: str | None = None  # address of that endpoint; the key is read from OPENAI_API_KEY
    user_record: str | None = None  # write every user turn to this file, to be played back later
    user_replay: str | None = None  # the record that --user replay plays back
    steps: int | None = None  # training steps in total, resumed ones included (by policy)
    tasks_per_step: int | None = None  # P: tasks sampled each step (by policy)
    group_size: int | None = None  # G: episodes of each task, at least 2; their mean is the baseline (by policy)
    max_context: int | None = None  # tokens at which an episode ends as truncated (by policy)
    max_turns: int | None = None  # policy turns at which an episode ends as truncated (by policy)
    max_new_tokens: int | None = None  # most tokens the policy samples in one turn (by policy)
    temperature: float = 1.0  # of sampling and of the log-probs alike; there is no top-k and no top-p
    seed: int = 0  # of tasks and sampling
    lr: float | None = None  # AdamW learning rate (by policy)
    loss: str = "grpo"  # grpo, dr_grpo, dapo, gspo or cispo; see grpo.py
    updates_per_step: int = 1  # mu: optimizer steps on each batch; from the second on the ratios are clipped
    choose_tasks: str = "epochs"  # epochs: all in shuffled order; mixed: rather those whose past rewards differed
    oversample: int = 1  # DAPO: up to this many times P tasks a step, until P groups have unequal rewards; 1: off
    kl_coef: float = 0.0  # beta: weight of the k3 KL to the reference (the base without its LoRA adapter)
    ref_copy: bool = False  # keep a frozen copy of full weights as reference and for --user policy
    lora_rank: int | None = None  # LoRA rank on the attention projections; 0 trains all weights (by policy)
    dtype: str | None = None  # float32 or bfloat16 (by policy)
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    attn: str = "sinkflex"  # attention path: sinkflex, or transformers' eager or sdpa to compare with
    run_dir: str | None = None  # folder of this run; runs/ENV-DATE-TIME unless given
    resume: str | None = None  # run folder to carry on; its config.json is the default for all that you do not type
    checkpoint_every: int | None = None  # steps between checkpoints; the last two are kept (by policy)
    eval_every: int | None = None  # steps between evaluations, first and last always; 0: none (by policy)
    eval_only: bool = False  # evaluate and stop
    eval_tasks: int | None = None  # held-out tasks in an evaluation, or all there are (by policy)
    eval_trials: int | None = None  # sampled episodes of each; pass^k for every k up to this (by policy)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), field.type
            if not isinstance(value, wanted) and not (isinstance(value, int) and isinstance(float(value), wanted)):
                raise ValueError(f"--{field.name.replace('_', '-')} {value!r} is not of type {wanted}")
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                choices = ", ".join(a for a in allowed if a)
                raise ValueError(f"--{name} {getattr(self, name)!r} is unknown; allowed: {choices}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:  # NaN is not
                why = "; its mean reward is the baseline" if name == "group_size" else ""
                raise ValueError(f"--{name.replace('_', '-')} {value}: at least {least}{why}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature}: above 0 (evaluation is greedy as well by itself)")
        if self.tasks == "synthetic" and self.env != "retail":
            raise ValueError(f"--tasks synthetic is retail only, not --env {self.env}")
        if self.user == "llm" and not self.user_model:
            raise ValueError("--user llm needs --user-model NAME (and usually --user-base-url URL)")
        if self.user == "replay" and not self.user_replay:
            raise ValueError("--user replay needs --user-replay FILE")

    @property
    def eval_split(self) -> str:
        """The held-out partner of the training split; any other split is evaluated as it is."""
        return {"train": "test", "train_clean": "test_clean"}.get(self.split, self.split)


# What depends on the policy: "tiny" is a small model with all weights trained on a CPU, "lora" a real checkpoint.
PRESETS = {
    "tiny": dict(steps=24, tasks_per_step=16, group_size=8, max_context=1536, max_turns=14, max_new_tokens=48, lr=3e-4,
                 lora_rank=0, dtype="float32", checkpoint_every=4, eval_every=12, eval_tasks=200, eval_trials=4),
    "lora": dict(steps=100, tasks_per_step=8, group_size=8, max_context=16384, max_turns=60, max_new_tokens=1024,
                 lr=2e-5, lora_rank=16, dtype="bfloat16", checkpoint_every=5, eval_every=10, eval_tasks=40,
                 eval_trials=4),
}
MOST_ROWS = 256  # conversations at once, where memory holds more: a decoding step gains nothing from there on
FAULT_STEPS = 3  # so many bad steps in a row stop the run


def resolve(cfg: Config, preset: str, name: str) -> Config:
    """Fill the fields that depend on the policy, once, from PRESETS; what the user gave stays."""
    filled = {k: v for k, v in PRESETS[preset].items() if getattr(cfg, k) is None} | {"model": name}
    if cfg.tasks == "auto":
        filled["tasks"] = "synthetic" if preset == "tiny" and cfg.env == "retail" else "tau2"
    if cfg.env == "mock" and cfg.split == "train":
        filled["split"] = "base"  # the mock domain has no other
    return dataclasses.replace(cfg, **filled)


def parse_args(argv: list[str]) -> Config:
    """tyro's command line; with --resume RUN the run's config.json is the default, so only what is typed overrides."""
    default = Config()
    for i, word in enumerate(argv):
        if word == "--resume" or word.startswith("--resume="):
            run = word.partition("=")[2] or (argv[i + 1] if i + 1 < len(argv) else "")
            if not run:
                raise BadInput("--resume needs the folder of a run, such as runs/NAME")
            default = read_config(Path(run), Config)
    return tyro.cli(Config, default=default, args=argv, description=__doc__)


def leave_judged_out(tasks: list, split: str) -> list:
    """The tasks that tau2 judges without a language model; one line names the others."""
    judged = [task.id for task in tasks if needs_judge(task)]
    if judged:
        print(f"{split}: {len(judged)} of {len(tasks)} tasks need a judge model and are left out: {', '.join(judged)}")
    return [task for task in tasks if task.id not in judged]


def load_tasks(cfg: Config) -> tuple[list, list]:
    """(training tasks, held-out tasks), both tau2 Task objects."""
    if cfg.tasks == "synthetic":
        return (make_tasks(n=1000, seed=cfg.seed, split="train"), make_tasks(n=cfg.eval_tasks, seed=0, split="val"))
    held_out = leave_judged_out(domain_tasks(cfg.env, cfg.eval_split), cfg.eval_split)
    order = random.Random(0).sample(range(len(held_out)), len(held_out))[: cfg.eval_tasks]
    tasks = leave_judged_out(domain_tasks(cfg.env, cfg.split), cfg.split)
    return tasks, [held_out[i] for i in sorted(order)]


def pick_tasks(task_ids: list[str], seed: int, step: int, count: int) -> list[str]:
    """The tasks of a step: epochs in shuffled order. A function of (seed, step), so a resumed run goes on alike."""
    count = min(count, len(task_ids))
    per_epoch = len(task_ids) // count
    epoch, place = divmod(step, per_epoch)
    order = random.Random(f"tasks/{seed}/{epoch}").sample(task_ids, len(task_ids))
    return order[place * count:(place + 1) * count]


def pick_mixed(task_ids: list[str], seed: int, step: int, count: int, history: dict) -> list[str]:
    """The tasks of a step, drawn without replacement by how uncertain their outcome is, p (1 - p).

    Args:
        history: task id -> [sum of rewards, episodes] so far; p = (sum + 1) / (episodes + 2), so that an unseen
            task counts as 1/2 and a task that was always or never solved keeps a small chance.
    Returns: min(count, all) ids: a function of the arguments, so that a resumed run goes on alike.
    Source: keys u ** (1 / weight), Efraimidis and Spirakis (2006), doi:10.1016/j.ipl.2005.11.003.
    """
    rng = random.Random(f"mixed/{seed}/{step}")
    keys = {}
    for task_id in task_ids:
        paid, tried = history.get(task_id, (0.0, 0))
        chance = (paid + 1) / (tried + 2)
        keys[task_id] = rng.random() ** (1 / (chance * (1 - chance)))
    return sorted(task_ids, key=keys.get, reverse=True)[:count]


def step_tasks(cfg: Config, task_ids: list[str], step: int, history: dict) -> list[str]:
    """All tasks that a step may try, in order: P of them, or `oversample` times as many."""
    count = cfg.tasks_per_step * cfg.oversample
    if cfg.choose_tasks == "mixed":
        return pick_mixed(task_ids, cfg.seed, step, count, history)
    return pick_tasks(task_ids, cfg.seed, step, count)


def make_user(cfg: Config, policy, chat, reference):
    """The simulated customer of DESIGN.md's four; every reported number carries its name."""
    if cfg.user == "llm":
        user = LLMUser(cfg.user_model, base_url=cfg.user_base_url)
    elif cfg.user == "replay":
        user = ReplayUser(cfg.user_replay)
    elif cfg.user == "policy":
        user = PolicyUser(reference or policy.model, chat, generate_turns, Row, frozen=reference is not None,
                          max_context=cfg.max_context)
    else:
        user = ScriptedUser()
    return ReplayUser(cfg.user_record, record=user) if cfg.user_record else user


def act(cfg: Config, world: dict, make_env, task_ids: list[str], group_size: int, temperature: float, step: int,
        title: str) -> tuple[list, dict]:
    """`rollout.collect` with this run's policy, customer and limits: the episodes, task by task, and statistics."""
    world["policy"].model.eval()
    limit = world["rows"]
    rows = limit.rows(cfg.max_context)
    if limit.device.type == "cuda" or rows < min(limit.most, len(task_ids) * group_size):
        print(f"{title}: {rows} conversations at once: {limit.why}", flush=True)
    return within_memory([1], 1, "conversation", lambda _: collect(
        model=world["policy"].model, chat=world["chat"], make_env=make_env, user=world["user"], task_ids=task_ids,
        group_size=group_size, seed=cfg.seed, step=step, temperature=temperature, max_context=cfg.max_context,
        max_turns=cfg.max_turns, max_new_tokens=cfg.max_new_tokens, limit=limit, progress=title))


def act_until_mixed(cfg: Config, world: dict, step: int, history: dict) -> tuple[list[str], list, dict]:
    """The rollout of a step: P tasks; with `oversample` P more at a time until P groups have unequal rewards.

    Returns: the tasks tried, their episodes (equal groups too: they are counted, and teach nothing), statistics.
    Source: dynamic sampling, DAPO, arXiv:2503.14476; here it is bounded, and surplus groups are kept.
    """
    candidates = step_tasks(cfg, world["train_ids"], step, history)
    tried, episodes, parts, mixed = [], [], [], 0
    while len(tried) < len(candidates) and mixed < cfg.tasks_per_step:
        chunk = candidates[len(tried):len(tried) + cfg.tasks_per_step]
        new, stats = act(cfg, world, world["make_env"], chunk, cfg.group_size, cfg.temperature, step,
                         f"rollout {step + 1}/{cfg.steps}")
        tried += chunk
        episodes += new
        parts.append(stats)
        for start in range(0, len(new), cfg.group_size):
            mixed += len({e.reward for e in new[start:start + cfg.group_size] if e.valid}) > 1
    return tried, episodes, added_up(parts)


def added_up(parts: list[dict]) -> dict:
    """Rollout statistics of several calls as one: counts added, busy_share by sampled tokens."""
    if len(parts) == 1:
        return parts[0]
    total = {}
    for name in ("sampled_tokens", "tokens_forwarded", "slots_forwarded", "rounds"):
        total[name] = sum(part[name] for part in parts)
    busy = sum(part["busy_share"] * part["sampled_tokens"] for part in parts)
    return total | {"busy_share": busy / max(total["sampled_tokens"], 1)}


def remember(history: dict, episodes: list) -> None:
    """Add the rewards of a step to `history`, task id -> [sum of rewards, episodes]; faults are left out."""
    for episode in episodes:
        if episode.valid:
            paid, tried = history.get(episode.task_id, (0.0, 0))
            history[episode.task_id] = [paid + episode.reward, tried + 1]


def evaluate(cfg: Config, world: dict, step: int, run_dir: Path) -> dict:
    """Held-out tasks, sampled `eval_trials` times and greedily once; the same noise at every call, so calls pair."""
    sampled, greedy = (act(cfg, world, world["make_eval_env"], world["eval_ids"], trials, temperature, -1,
                           f"evaluate {step}, {kind}")[0]
                       for kind, trials, temperature in (("sampled", cfg.eval_trials, cfg.temperature),
                                                         ("greedy", 1, 0.0)))
    for kind, episodes in (("sampled", sampled), ("greedy", greedy)):
        save_episodes(run_dir / "episodes" / f"eval_{step:06d}_{kind}.jsonl", episodes, world["policy"].tokenizer)
    tasks = [task.model_dump(mode="json") for task in world["eval_tasks"]]
    (run_dir / "eval_tasks.json").write_text(json.dumps(tasks), encoding="utf-8")  # for report.py RUN --tau2 FILE
    return {
        "step": step, **eval_summary([dataclasses.asdict(e) for e in sampled], seed=cfg.seed),
        "eval_greedy": mean_or_none([e.reward for e in greedy if e.valid]),
        "eval_do_nothing": mean_or_none([world["do_nothing"](t) for t in world["eval_ids"]]),
        "eval_trials": cfg.eval_trials, "user": world["user"].name, "tau2_version": tau2_version(),
        "policy": world["policy"].name, "env": cfg.env, "tasks": cfg.tasks,
        "split": "val" if cfg.tasks == "synthetic" else cfg.eval_split}


def mean_or_none(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def learn(cfg: Config, world: dict, episodes: list) -> dict:
    """Compare and learn: advantages against siblings, then one GRPO update; memory that runs out halves the budget."""
    shape = (-1, cfg.group_size)
    rewards = torch.tensor([e.reward for e in episodes]).view(shape)  # (P, G)
    valid = torch.tensor([e.valid for e in episodes]).view(shape)  # (P, G)
    advantages = group_advantages(rewards, valid, divide_by_std=cfg.loss != "dr_grpo")  # (P, G)
    batch = to_batch(episodes, world["chat"].pad_id)
    world["policy"].model.train()  # or activation checkpointing stays off; there is no dropout
    floor = cfg.max_context // 2
    return within_memory(world["token_budget"], floor, "tokens in a micro-batch", lambda limit: update_policy(
        world["policy"].model, world["optimizer"], batch, advantages.flatten(), valid=valid.flatten(),
        make_layout=pack_layout if cfg.attn == "sinkflex" else None, loss=cfg.loss, kl_coef=cfg.kl_coef,
        updates_per_step=cfg.updates_per_step, ref_model=world["reference"], temperature=cfg.temperature,
        max_tokens_per_micro_batch=limit,
        max_response_tokens=cfg.max_context, progress="update"))


def build_world(cfg: Config) -> tuple[Config, dict]:
    """Load what the loop needs; anything wrong with the input is found here, before the first token."""
    transformers_logging.disable_progress_bar()  # its bars for loading and saving would stand between ours
    policy = load_policy(cfg.model, device=cfg.device, dtype=cfg.dtype, lora_rank=cfg.lora_rank, attn=cfg.attn)
    cfg = dataclasses.replace(resolve(cfg, policy.preset, policy.name), lora_rank=policy.lora_rank)
    print(f"policy: {policy.name} ({policy.reason})")
    if policy.preset == "tiny":
        print("the small policy's prompt holds neither tau2's policy text nor tool schemas; it knows them by training")
        if cfg.tasks != "synthetic":
            print(f"note: the small policy was trained on synthetic retail only; {cfg.env} tasks of tau2 are beyond it")
    else:
        enable_checkpointing(policy.model)
    train_tasks, eval_tasks = load_tasks(cfg)
    if cfg.tasks_per_step > len(train_tasks):
        print(f"note: --tasks-per-step {cfg.tasks_per_step} is more than the {len(train_tasks)} tasks: all of them")
    reference = None
    if cfg.ref_copy:
        reference = load_policy(cfg.model, device=cfg.device, dtype=cfg.dtype, lora_rank=0, attn=cfg.attn).model
        reference.requires_grad_(False)
    if cfg.kl_coef and reference is None and policy.lora_rank == 0:
        raise ValueError(f"--kl-coef {cfg.kl_coef} with full weights needs --ref-copy (with LoRA the base is at hand)")
    chat = load_chat(policy.tokenizer)
    scores = {}  # task id -> reward for doing nothing, computed when first asked for
    by_id = {t.id: t for t in train_tasks + eval_tasks}

    def do_nothing(task_id: str) -> float:
        if task_id not in scores:
            scores[task_id] = do_nothing_reward(by_id[task_id], domain=cfg.env)
        return scores[task_id]

    trainable = [p for p in policy.model.parameters() if p.requires_grad]
    return cfg, dict(
        policy=policy, chat=chat, reference=reference, user=make_user(cfg, policy, chat, reference),
        optimizer=WideAdamW(trainable, lr=cfg.lr),
        make_env=lambda: Tau2Env(domain=cfg.env, tasks=train_tasks),
        make_eval_env=lambda: Tau2Env(domain=cfg.env, tasks=eval_tasks),
        train_ids=[t.id for t in train_tasks], eval_ids=[t.id for t in eval_tasks], eval_tasks=eval_tasks,
        do_nothing=do_nothing, rows=limit_rows(policy.model, MOST_ROWS),
        token_budget=[max(16384, cfg.max_context)])


def train(cfg: Config) -> Path:
    """Run (or resume) one training run.

    Returns: the run folder, with config.json, metrics.jsonl, episodes/, plots.png, ckpt_*/ and policy/.
    Raises: BadInput for what the user gave; RunStopped when faults, non-finite updates or a full disk end the run.
    """
    try:
        cfg, world = build_world(cfg)
        run_dir, first_step, state = open_run(cfg, world)
    except (ValueError, OSError, ImportError) as fault:
        raise BadInput(str(fault).strip().splitlines()[0]) from fault
    policy, metrics_file = world["policy"], run_dir / "metrics.jsonl"
    streak = state.get("streak", {"faults": 0, "skipped": 0})
    history = state.get("history", {})  # task id -> [sum of rewards, episodes]
    plotter = Plotter(run_dir)

    def checkpoint(step: int, row: dict | None) -> None:
        save_checkpoint(run_dir / f"ckpt_{step:06d}", policy.model, world["optimizer"],
                        dict(step=step, row=row, streak=streak, history=history, torch_rng=torch.get_rng_state(),
                             tasks=step_tasks(cfg, world["train_ids"], step, history)))

    def measure(step: int) -> None:
        if not cfg.eval_only and any(r["step"] == step and "eval_mean_at_1" in r for r in read_rows(metrics_file)):
            return  # resumed right after an evaluation
        row = evaluate(cfg, world, step, run_dir)
        if not cfg.eval_only:
            keep_best(run_dir, policy, row)
        append_row(metrics_file, row)
        if row["eval_ci95"] is None:
            raise RunStopped(f"every episode of the evaluation faulted: {row['eval_outcome_counts']}")
        low, high = row["eval_ci95"]
        print(f"evaluation at {step}: mean@1 {row['eval_mean_at_1']:.3f} [{low:.3f}, {high:.3f}] "
              f"{pass_words(row)}"
              f"greedy {row['eval_greedy']} doing nothing {row['eval_do_nothing']} "
              f"({row['eval_tasks']} tasks, {row['split']}, user {row['user']})", flush=True)
        plotter.draw(now=True)

    def due(step: int) -> bool:
        return bool(cfg.eval_every) and (step % cfg.eval_every == 0 or step == cfg.steps)

    row = state.get("row")
    try:
        if not cfg.resume and not cfg.eval_only:
            checkpoint(0, None)  # so that a run killed in its first steps can be resumed
        if cfg.eval_only or due(first_step):
            measure(first_step)
        for step in range(first_step, 0 if cfg.eval_only else cfg.steps):
            # 1. Act: G episodes on each of P tasks with the current policy.
            started = [time.perf_counter()]
            memory_gib(policy.model.device)
            task_ids, episodes, stats = act_until_mixed(cfg, world, step, history)
            started.append(time.perf_counter())
            rollout_peak, do_nothing = memory_gib(policy.model.device)["vram"], mean_or_none(
                [world["do_nothing"](t) for t in task_ids])
            with interrupt_later():
                # 2. Judge: reward and outcome. A fault of the world is not a reward of 0: it leaves the group.
                # 3. Compare: each reward against its siblings on the same task. No critic.
                # 4. Learn: clipped policy gradient over the tokens that the policy itself sampled.
                learned = learn(cfg, world, episodes)
                remember(history, episodes)
                # 5. Report: one JSON line, one console line; now and then an evaluation, a plot, a checkpoint.
                peak = memory_gib(policy.model.device)
                row = step_row(step + 1, episodes, stats, learned, do_nothing, started)
                row |= {"rollout_peak_gib": rollout_peak, "update_peak_gib": peak["vram"], "rss_gib": peak["rss"],
                        "vram_total_gib": peak["total"], "micro_batch_tokens": world["token_budget"][0]}
                save_episodes(run_dir / "episodes" / f"step_{step + 1:06d}.jsonl", episodes, policy.tokenizer)
                streak["faults"] = streak["faults"] + 1 if row["faults"] > len(episodes) / 2 else 0
                streak["skipped"] = streak["skipped"] + 1 if row["skipped_updates"] else 0
                stopping = max(streak.values()) >= min(FAULT_STEPS, cfg.steps)
                if stopping or (step + 1) % cfg.checkpoint_every == 0 or step + 1 == cfg.steps:
                    checkpoint(step + 1, row)
                append_row(metrics_file, row)
            print(console_line(row, cfg.steps) + entropy_words(read_rows(metrics_file)), flush=True)
            plotter.draw(now=stopping or step + 1 == cfg.steps)
            if stopping:
                raise RunStopped(f"{FAULT_STEPS} steps in a row with faults in over half of the episodes or an update "
                                 f"that is not finite: outcomes {row['outcome_counts']}, skipped {streak['skipped']}, "
                                 f"first fault: {next((e.fault for e in episodes if e.fault), None)}")
            if due(step + 1):
                measure(step + 1)
        if not cfg.eval_only:
            save_policy(run_dir / "policy", policy)
    except OSError as fault:
        raise RunStopped(f"a file could not be written: {fault}; earlier checkpoints are intact") from fault
    except KeyboardInterrupt:
        done = row["step"] if row else first_step
        try:
            if done > first_step:
                checkpoint(done, row)
                plotter.draw(now=True)
        except OSError as fault:
            print(f"no checkpoint of step {done}: {fault}")
        print(f"interrupted after step {done}; carry on with: python train.py --resume {run_dir}", flush=True)
        raise
    if best_line(run_dir):
        print(best_line(run_dir))
    print(run_dir)
    return run_dir


def step_row(step: int, episodes: list, stats: dict, learned: dict, do_nothing: float, started: list[float]) -> dict:
    """The line of metrics.jsonl for one step; report.METRICS says what each name means."""
    rewards = torch.tensor([e.reward for e in episodes if e.valid])  # (valid episodes,)
    sampled = torch.tensor([sum(e.response_mask) for e in episodes], dtype=torch.float)  # (B,)
    context = torch.tensor([len(e.prompt_ids) + len(e.response_ids) for e in episodes], dtype=torch.float)  # (B,)
    outcomes = [e.outcome for e in episodes]
    rollout_s, update_s = started[1] - started[0], time.perf_counter() - started[1]
    return learned | {
        "step": step, "reward_mean": rewards.mean().item() if len(rewards) else None,
        "reward_std": rewards.std(correction=0).item() if len(rewards) else None, "do_nothing": do_nothing,
        "outcome_counts": {name: outcomes.count(name) for name in sorted(set(outcomes))},
        "faults": sum(not e.valid for e in episodes), "episodes": len(episodes), "episodes_valid": len(rewards),
        "groups": len({e.uid for e in episodes}), "turns_mean": sum(e.turns for e in episodes) / len(episodes),
        "response_tokens": sampled.mean().item(), "response_tokens_max": sampled.max().item(),
        "context_tokens": context.mean().item(),
        "taught_share": learned["trained_tokens"] / max(sampled.sum().item(), 1),
        **{k: stats[k] for k in ("sampled_tokens", "tokens_forwarded", "slots_forwarded", "busy_share", "rounds")},
        "rollout_s": round(rollout_s, 3), "update_s": round(update_s, 3), "step_s": round(rollout_s + update_s, 3),
        "rollout_tokens_per_s": round(sampled.sum().item() / rollout_s, 1)}


def console_line(row: dict, steps: int) -> str:
    """One line a step, in plain words."""
    counts = " ".join(f"{k} {v}" for k, v in row["outcome_counts"].items())
    reward = "none" if row["reward_mean"] is None else f"{row['reward_mean']:.3f}"
    line = f"step {row['step']}/{steps} reward {reward} (doing nothing {row['do_nothing']:.3f}) {counts}"
    if row["faults"]:
        line += f" | {row['faults']} FAULTS"
    if row["loss"] is None and not row["skipped_updates"]:
        equal = row["faults"] < row["episodes"]
        return line + (" | all groups equal, nothing learned this step" if equal else " | nothing learned this step")
    if row["skipped_updates"]:
        return line + " | loss or gradient not finite, update skipped"
    return line + (f" | loss {row['loss']:+.1e} grad {row['grad_norm']:.3f} entropy {row['entropy']:.3f} "
                   f"equal groups {row['zero_variance_groups']} gap {row['logp_gap_max']:.1e} "
                   f"| rollout {row['rollout_s']:.1f}s update {row['update_s']:.1f}s")


def pass_words(row: dict) -> str:
    """pass^k of the largest k that was measured, to stand beside mean@1; nothing for a single trial."""
    k = max(row["eval_pass_hat_k"], key=int)
    return f"pass^{k} {row['eval_pass_hat_k'][k]:.3f} " if int(k) > 1 else ""


def entropy_words(rows: list[dict], last: int = 5, near_zero: float = 0.01, flat: float = 0.05) -> str:
    """Says that a policy has stopped exploring: entropy below `near_zero` nats a token, reward within `flat`."""
    steps = [row for row in rows if row.get("entropy") is not None and row.get("reward_mean") is not None][-last:]
    rewards = [row["reward_mean"] for row in steps]
    if len(steps) < last or max(row["entropy"] for row in steps) >= near_zero or max(rewards) - min(rewards) > flat:
        return ""
    return f" | entropy near 0 and reward flat for {last} steps: siblings hardly differ, little is left to learn from"


def main(argv: list[str]) -> int:
    """Exit codes: 0 done; 1 the run stopped itself; 2 bad input, in one line; 130 Ctrl-C."""
    try:
        train(parse_args(argv))
    except BadInput as fault:
        print(f"train.py: {fault}", file=sys.stderr)
        return 2
    except RunStopped as fault:
        print(f"train.py: run stopped: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__" and "__file__" in globals():
    sys.exit(main(sys.argv[1:]))
