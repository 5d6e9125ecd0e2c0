"""The whole loop, in process and killed from outside, on real tau2 tasks with small policies."""
import functools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import rollout as rollout_room
import run_folder
import train as loop
from model import latest_checkpoint
from report import METRICS, read_rows
from train import BadInput, Config, RunStopped, main, parse_args, pick_mixed, pick_tasks, train

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(tasks_per_step=2, group_size=2, eval_tasks=2, max_turns=6, max_new_tokens=24, eval_every=0)


def coin_judged(real):
    """`collect` with tau2's verdict replaced by a coin of (task, sibling, step): something to learn from, always."""
    def judged(**kwargs):
        episodes, stats = real(**kwargs)
        for e in episodes:
            e.reward = float(random.Random(f"{e.task_id}/{e.sibling}/{kwargs['step']}").random() < 0.5)
        return episodes, stats
    return judged


def seeded_reward(monkeypatch):
    monkeypatch.setattr(loop, "collect", coin_judged(loop.collect))


def test_two_steps_on_real_retail_tasks(tmp_path, capsys):
    """The spine: tau2's own tasks through rollout, reward, update, files. Guards every joint between the rooms."""
    run = train(Config(steps=2, tasks="tau2", run_dir=str(tmp_path / "run"), **SMALL | {"eval_every": 2}))
    out = capsys.readouterr().out
    assert out.strip().splitlines()[0].startswith("policy: ")
    assert out.strip().splitlines()[-1] == str(run)
    rows = read_rows(run / "metrics.jsonl")
    assert [r["step"] for r in rows if "reward_mean" in r] == [1, 2]
    assert [r["step"] for r in rows if "eval_mean_at_1" in r] == [0, 2]
    for row in rows:
        assert set(row) <= set(METRICS)
    for row in (r for r in rows if "reward_mean" in r):
        if row["zero_variance_groups"] == 2:
            assert row["loss"] is None and row["grad_norm"] is None
            assert "all groups equal, nothing learned this step" in out
        assert row["update_peak_gib"] is None and row["rss_gib"] > 0  # no GPU here
    assert json.loads((run / "config.json").read_text())["lr"] == loop.PRESETS["tiny"]["lr"]
    assert (run / "plots.png").stat().st_size > 5000 and latest_checkpoint(run).name == "ckpt_000002"
    episode = json.loads((run / "episodes/step_000001.jsonl").read_text().splitlines()[0])
    assert episode["messages"][0]["role"] == "assistant" and any(s for _, s in episode["tokens"])


def test_seeded_rewards_change_the_weights(tmp_path, monkeypatch):
    """With something to learn the weights must move: guards a loop that reports without learning."""
    seeded_reward(monkeypatch)
    kept = {}
    real = loop.load_policy

    def load(*args, **kwargs):
        policy = real(*args, **kwargs)
        kept["before"] = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
        kept["model"] = policy.model
        return policy
    monkeypatch.setattr(loop, "load_policy", load)
    run = train(Config(steps=1, run_dir=str(tmp_path / "run"), **SMALL | {"tasks_per_step": 4, "group_size": 4}))
    row = read_rows(run / "metrics.jsonl")[0]
    assert row["grad_norm"] > 0 and row["zero_variance_groups"] < 4 and row["loss"] is not None
    assert row["logp_gap_max"] < 1e-3
    moved = [n for n, p in kept["model"].named_parameters() if not torch.equal(p, kept["before"][n])]
    assert any("self_attn.q_proj" in n for n in moved) and any("sinks" in n for n in moved)


@pytest.mark.parametrize("argv, words", [
    (["--env", "hotel"], ["hotel", "retail"]),
    (["--split", "dev"], ["dev", "test_clean"]),
    (["--group-size", "1"], ["1", "at least 2"]),
    (["--loss", "ppo"], ["ppo", "dr_grpo"]),
    (["--temperature", "nan"], ["nan"]),
    (["--tasks", "synthetic", "--env", "airline"], ["airline"]),
    (["--model", "no/such-model-anywhere"], ["no/such-model-anywhere"]),
    (["--resume", "no/such/run"], ["no/such/run", "config.json"]),
    (["--user", "llm"], ["--user-model"]),
    (["--user", "replay", "--user-replay", "no-such-record.jsonl"], ["no-such-record.jsonl"]),
    (["--user", "policy"], ["--ref-copy"]),
    (["--lr", "inf"], ["inf", "--lr"]),
    (["--kl-coef", "0.1"], ["0.1", "--ref-copy"]),
    (["--resume", ""], ["--resume", "folder"]),
    (["--env", "mock", "--split", "test"], ["test", "mock", "base"]),
])
def test_bad_input_is_one_clear_line_and_exit_code_2(argv, words, capsys, monkeypatch, tmp_path):
    """A traceback for a typo sends newcomers away."""
    monkeypatch.chdir(tmp_path)
    try:
        code = main(argv)
    except SystemExit as stop:  # tyro's own exit for what it parses
        code = stop.code
    err = capsys.readouterr().err
    flat = " ".join(err.replace("│", " ").split())
    assert code == 2 and "Traceback" not in err
    for word in words:
        assert word in flat, flat


def test_resume_refuses_another_run(tmp_path, capsys):
    """Another group size under the same run name would mix two experiments in one file."""
    run = train(Config(steps=1, run_dir=str(tmp_path / "run"), **SMALL))
    assert main(["--resume", str(run), "--group-size", "4"]) == 2
    assert "--group-size was 2, now 4" in capsys.readouterr().err
    assert main(["--resume", str(run), "--steps", "2", "--lr", "0.0001"]) == 0
    out = capsys.readouterr().out
    assert "--lr changes from" in out and "--steps changes from 1 to 2" in out
    assert [r["step"] for r in read_rows(run / "metrics.jsonl")] == [1, 2]
    assert main(["--run-dir", str(run)]) == 2  # a second run into the same folder
    assert "holds a run already" in capsys.readouterr().err


def test_resume_without_checkpoint_is_named(tmp_path, capsys):
    """A folder that was killed before its first checkpoint: said, not a traceback."""
    run = train(Config(steps=1, run_dir=str(tmp_path / "run"), **SMALL))
    for checkpoint in run.glob("ckpt_*"):
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    assert main(["--resume", str(run)]) == 2
    assert "checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{\"env\": \"ret", "[1]", "{\"steps\": \"two\"}", "{\"env\": null}", "{\"wibble\": 3}",
                                  "{\"max_turns\": 3.5}"])
def test_a_broken_config_is_one_line(tmp_path, capsys, text):
    """--resume of a run whose config.json was torn or edited: a traceback says nothing to its owner."""
    (tmp_path / "config.json").write_text(text)
    assert main(["--resume", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "config.json" in err and len(err.strip().splitlines()) == 1


def test_run_folders_are_not_mixed(tmp_path, capsys):
    """A folder with other files in it: an older checkpoint there would win over the new ones."""
    (tmp_path / "ckpt_000900").mkdir()
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_measuring_a_run_leaves_it_as_it_was(tmp_path, capsys):
    """--eval-only --resume must not turn the run into one that only evaluates, nor cut its rows."""
    run = train(Config(steps=2, checkpoint_every=9, run_dir=str(tmp_path / "run"), **SMALL))
    before, config = read_rows(run / "metrics.jsonl"), (run / "config.json").read_text()
    assert main(["--resume", str(run), "--eval-only", "--eval-tasks", "1"]) == 0
    rows = read_rows(run / "metrics.jsonl")
    assert rows[:-1] == before and rows[-1]["eval_tasks"] == 1 and (run / "config.json").read_text() == config
    assert main(["--resume", str(run), "--steps", "1"]) == 2 and "has done 2 already" in capsys.readouterr().err
    assert main(["--resume", str(run), "--steps", "3"]) == 0
    assert read_rows(run / "metrics.jsonl")[-1]["step"] == 3


def test_a_run_stopped_before_its_first_step_resumes(tmp_path, monkeypatch):
    """Killed in the first steps, a run could be neither resumed nor started again in the same folder."""
    real = loop.collect
    monkeypatch.setattr(loop, "collect", lambda **k: (_ for _ in ()).throw(KeyboardInterrupt))
    argv = ["--tasks-per-step", "2", "--group-size", "2", "--eval-every", "0", "--max-turns", "4", "--steps", "1",
            "--run-dir", str(tmp_path / "run")]
    assert main(argv) == 130
    monkeypatch.setattr(loop, "collect", real)
    assert main(["--resume", str(tmp_path / "run")]) == 0
    assert [r["step"] for r in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_task_sampler_is_a_function_of_seed_and_step():
    """A sampler with hidden state would give a resumed run other tasks."""
    ids = [str(i) for i in range(10)]
    epoch = [t for step in range(3) for t in pick_tasks(ids, 1, step, 3)]
    assert len(set(epoch)) == 9  # no task twice in an epoch
    assert pick_tasks(ids, 1, 2, 3) == pick_tasks(ids, 1, 2, 3) != pick_tasks(ids, 2, 2, 3)


def test_mixed_tasks_are_drawn_more_often_and_by_seed_and_step_alone():
    """A sampler that ignores the history, or draws from a global state, teaches nothing and can not be resumed."""
    ids = [f"t{i}" for i in range(40)]
    history = {t: [8.0, 8] for t in ids[:20]} | {t: [4.0, 8] for t in ids[20:]}  # 9/10 and 1/2: 0.09 against 0.25
    drawn = [pick_mixed(ids, 1, step, 10, history) for step in range(200)]
    assert drawn == [pick_mixed(ids, 1, step, 10, history) for step in range(200)]
    assert all(len(set(tasks)) == 10 for tasks in drawn) and drawn[0] != drawn[1]
    mixed = sum(t in ids[20:] for tasks in drawn for t in tasks) / 2000
    first = sum(tasks[0] in ids[20:] for tasks in drawn) / 200
    assert mixed > 0.6 and abs(first - 0.25 / 0.34) < 0.1  # the first draw is proportional to the weights
    assert sorted(pick_mixed(ids, 1, 0, 99, {})) == sorted(ids)


def fake_rollouts(monkeypatch, rewards_of):
    """`act` replaced by episodes of two siblings with given rewards; returns the list of calls."""
    calls = []

    def act(cfg, world, make_env, task_ids, group_size, temperature, step, title):
        calls.append(task_ids)
        episodes = [SimpleNamespace(task_id=t, reward=r, valid=True) for t in task_ids for r in rewards_of(t)]
        return episodes, dict(sampled_tokens=10, tokens_forwarded=20, slots_forwarded=30, rounds=2,
                              busy_share=0.2 * len(calls))
    monkeypatch.setattr(loop, "act", act)
    return calls


def test_oversampling_stops_at_enough_mixed_groups_or_at_its_bound(monkeypatch):
    """Unbounded it hangs once all is solved; a lost chunk would sample tokens that nobody counts."""
    cfg = Config(tasks_per_step=2, group_size=2, oversample=3, steps=4)
    world = {"train_ids": [f"t{i}" for i in range(12)], "make_env": None}
    calls = fake_rollouts(monkeypatch, lambda task: (1.0, 1.0))
    tried, episodes, stats = loop.act_until_mixed(cfg, world, 0, {})
    assert len(calls) == 3 and len(set(tried)) == 6 and len(episodes) == 12
    assert stats == dict(sampled_tokens=30, tokens_forwarded=60, slots_forwarded=90, rounds=6,
                         busy_share=pytest.approx(0.4))
    calls = fake_rollouts(monkeypatch, lambda task: (0.0, 1.0))
    assert len(loop.act_until_mixed(cfg, world, 0, {})[0]) == 2 and len(calls) == 1
    second = tried[2:4]
    calls = fake_rollouts(monkeypatch, lambda task: (0.0, float(task in second)))
    assert loop.act_until_mixed(cfg, world, 0, {})[0] == tried[:4]


def test_history_is_resumed_and_chooses_the_same_tasks(tmp_path, monkeypatch):
    """Past rewards that are lost with the process choose other tasks after a resume than without a kill."""
    seeded_reward(monkeypatch)
    mixed = SMALL | dict(tasks_per_step=1, choose_tasks="mixed", oversample=2, updates_per_step=2)
    straight = train(Config(steps=3, checkpoint_every=1, run_dir=str(tmp_path / "a"), **mixed))
    train(Config(steps=2, checkpoint_every=1, run_dir=str(tmp_path / "b"), **mixed))
    resumed = train(parse_args(["--resume", str(tmp_path / "b"), "--steps", "3"]))
    rows = read_rows(straight / "metrics.jsonl")
    assert stable(rows) == stable(read_rows(resumed / "metrics.jsonl"))
    for row in rows:
        assert row["taught_share"] == pytest.approx(row["trained_tokens"] / row["sampled_tokens"])
        assert row["updates"] in (0, 2) and 1 <= row["groups"] <= 2


def test_console_says_when_exploration_has_ended():
    """An entropy near 0 with a flat reward looks like a healthy run unless somebody says so."""
    rows = [{"entropy": 0.004, "reward_mean": 0.75}] * 5
    assert "entropy near 0" in loop.entropy_words(rows)
    assert not loop.entropy_words(rows[:4])
    assert not loop.entropy_words(rows[:4] + [{"entropy": 0.02, "reward_mean": 0.75}])
    assert not loop.entropy_words(rows[:4] + [{"entropy": 0.004, "reward_mean": 0.85}])
    assert loop.pass_words({"eval_pass_hat_k": {"1": 0.7, "2": 0.6, "4": 0.5}}) == "pass^4 0.500 "
    assert loop.pass_words({"eval_pass_hat_k": {"1": 0.7}}) == ""


def test_typed_flags_win_over_the_resumed_config(tmp_path):
    """--resume takes config.json as the default; only what is typed overrides it."""
    (tmp_path / "config.json").write_text(json.dumps({"env": "retail", "lr": 0.5, "steps": 9}))
    cfg = parse_args(["--resume", str(tmp_path), "--steps", "11"])
    assert (cfg.lr, cfg.steps, cfg.resume) == (0.5, 11, str(tmp_path))


def test_faults_stop_the_run_with_a_checkpoint(tmp_path, monkeypatch, capsys):
    """A dead LLM endpoint must not become three thousand rewards of zero."""
    quick = functools.partial(loop.LLMUser, pause_s=0.01, timeout_s=2.0)
    monkeypatch.setattr(loop, "LLMUser", quick)
    dead = dict(user="llm", user_model="nobody", user_base_url="http://127.0.0.1:9/v1")
    with pytest.raises(RunStopped, match="user_error"):
        train(Config(steps=9, run_dir=str(tmp_path / "run"), **SMALL | dead))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [r["faults"] for r in rows] == [4, 4, 4] and all(r["reward_mean"] is None for r in rows)
    assert latest_checkpoint(tmp_path / "run").name == "ckpt_000003"
    out = capsys.readouterr().out
    assert "4 FAULTS" in out and "all groups equal" not in out
    assert main(["--run-dir", str(tmp_path / "again"), "--steps", "1", "--tasks-per-step", "2", "--group-size", "2",
                 "--eval-every", "0", "--user", "llm", "--user-model", "nobody",
                 "--user-base-url", "http://127.0.0.1:9/v1"]) == 1
    assert "run stopped" in capsys.readouterr().err


def test_nonfinite_updates_stop_the_run(tmp_path, monkeypatch):
    """NaN in the weights spoils every later checkpoint (trl 6166)."""
    seeded_reward(monkeypatch)
    real = loop.group_advantages
    monkeypatch.setattr(loop, "group_advantages", lambda *a, **k: real(*a, **k) * float("inf"))
    with pytest.raises(RunStopped, match="skipped 3"):
        train(Config(steps=9, run_dir=str(tmp_path / "run"), **SMALL | {"group_size": 4, "tasks_per_step": 3}))


def test_out_of_memory_halves_and_goes_on(tmp_path, monkeypatch, capsys):
    """Memory that runs out in one step must not end a night's run."""
    seeded_reward(monkeypatch)
    real_turns, real_update, rows, tokens = rollout_room.generate_turns, loop.update_policy, [], []

    def turns_of_few(model, talking, **kwargs):
        rows.append(len(talking))
        if len(talking) > 5:
            raise torch.OutOfMemoryError("planted")
        return real_turns(model, talking, **kwargs)

    def update_little(*args, **kwargs):
        tokens.append(kwargs["max_tokens_per_micro_batch"])
        if len(tokens) == 1:
            raise MemoryError("planted")
        return real_update(*args, **kwargs)
    monkeypatch.setattr(rollout_room, "generate_turns", turns_of_few)
    monkeypatch.setattr(loop, "update_policy", update_little)
    run = train(Config(steps=1, run_dir=str(tmp_path / "run"), **SMALL | {"group_size": 4}))
    assert rows[0] == 8 and max(rows[1:]) == 4
    assert tokens[1] == tokens[0] // 2
    assert len(read_rows(run / "metrics.jsonl")) == 1
    assert "out of memory; from now on at most 4 conversations" in capsys.readouterr().out


def test_full_disk_names_the_checkpoint(tmp_path, monkeypatch):
    """A full disk must not leave half a checkpoint that looks whole."""
    real = loop.save_checkpoint

    def full(folder, *args, **kwargs):
        if "000002" in str(folder):
            raise OSError(28, "No space left on device")
        return real(folder, *args, **kwargs)
    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(RunStopped, match="No space left"):
        train(Config(steps=2, checkpoint_every=1, run_dir=str(tmp_path / "run"), **SMALL))
    assert latest_checkpoint(tmp_path / "run").name == "ckpt_000001"


def stable(rows):
    """Rows without what METRICS calls volatile (times, memory)."""
    return [{k: v for k, v in row.items() if not METRICS[k].volatile} for row in rows]


def child_run(argv):
    """A training process to be killed; the coin replaces the reward so that there is something to lose."""
    loop.collect = coin_judged(loop.collect)
    run_folder.PLOT_EVERY_S = 0.0  # a plot at every step, so that a kill can meet one
    sys.stdout = open(os.devnull, "w")
    sys.stderr = open(os.devnull, "w")
    sys.exit(loop.main(argv))


def progress(run):
    """Names of the run's checkpoints, to see that a step has been finished."""
    return sorted(p.name for p in run.glob("ckpt_*"))


@pytest.mark.slow
def test_killed_twenty_times_ends_with_the_same_rows(tmp_path):
    """SIGKILL at random moments, also in a checkpoint write and in a plot: every stable number of metrics.jsonl equal.

    Each kill comes at most one finished step after the restart, so the run cannot end before the twentieth.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    sizes = ["--tasks-per-step", "2", "--group-size", "4", "--eval-tasks", "4", "--eval-every", "6", "--max-turns", "4",
             "--max-new-tokens", "12", "--checkpoint-every", "1", "--steps", "24"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    child = context.Process(target=child_run, args=(sizes + ["--run-dir", str(whole)],))
    child.start()
    child.join()
    assert child.exitcode == 0
    rng, kills, moments, argv = random.Random(5), 0, [], sizes + ["--run-dir", str(killed)]
    while True:
        before = progress(killed)
        child = context.Process(target=child_run, args=(argv,))
        child.start()
        moment = rng.choice(["any time", "after a step", "in a checkpoint", "in a plot"])
        deadline = time.time() + (rng.uniform(0.5, 8.0) if moment == "any time" else 60.0)
        while child.is_alive() and kills < 20 and time.time() < deadline:
            stepped = progress(killed) != before
            if moment == "in a checkpoint" and any(killed.glob(".ckpt_*")):
                break
            if moment == "in a plot" and (killed / ".plots.tmp.png").exists():
                break
            if stepped and moment in ("any time", "after a step"):
                time.sleep(rng.uniform(0.0, 0.5))
                break
            time.sleep(0.0005)
        if child.is_alive() and kills < 20:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
            moments.append(moment)
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL, child.exitcode
        argv = ["--resume", str(killed)]
        if not progress(killed):  # killed before its first checkpoint: start over, as a person would
            subprocess.run(["rm", "-rf", str(killed)], check=True)
            argv = sizes + ["--run-dir", str(killed)]
    assert kills == 20 and set(moments) == {"any time", "after a step", "in a checkpoint", "in a plot"}
    left, right = stable(read_rows(whole / "metrics.jsonl")), stable(read_rows(killed / "metrics.jsonl"))
    assert left == right
    assert max(r["grad_norm"] or 0 for r in left if "grad_norm" in r) > 0
    moments_of = [load_file(latest_checkpoint(run) / "optimizer.safetensors") for run in (whole, killed)]
    assert all(torch.equal(value, moments_of[1][name]) for name, value in moments_of[0].items())
    assert any(value.abs().max() > 0 for name, value in moments_of[0].items() if name.endswith("exp_avg"))


def test_ctrl_c_leaves_a_run_that_resumes(tmp_path):
    """Exit code 130, a checkpoint of the last whole step, and a way on."""
    argv = ["--steps", "500", "--tasks-per-step", "2", "--group-size", "2", "--eval-every", "0", "--max-turns", "4",
            "--checkpoint-every", "400", "--run-dir", str(tmp_path / "run")]
    def hears_ctrl_c():  # whoever runs the tests in the background has it ignored, and a run keeps that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen([sys.executable, "train.py"] + argv, cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True, preexec_fn=hears_ctrl_c)
    try:
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 130 and "--resume" in rest
    finally:
        process.kill()
    done = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert latest_checkpoint(tmp_path / "run").name == f"ckpt_{done:06d}" and done >= 2
    assert main(["--resume", str(tmp_path / "run"), "--steps", str(done + 1)]) == 0
    assert read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == done + 1


def test_saved_policy_loads_with_plain_transformers(tmp_path):
    """What a run leaves must be usable without this repository."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    run = train(Config(steps=1, run_dir=str(tmp_path / "run"), **SMALL))
    model = AutoModelForCausalLM.from_pretrained(run / "policy")
    tokenizer = AutoTokenizer.from_pretrained(run / "policy")
    ids = tokenizer("cancel order #W2378156", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all() and model.config.model_type == "gpt_oss"


def test_eval_only_measures_and_stops(tmp_path):
    """--eval-only must not train, and must say what was measured with whom."""
    run = train(Config(eval_only=True, run_dir=str(tmp_path / "run"), **SMALL | {"eval_trials": 2}))
    rows = read_rows(run / "metrics.jsonl")
    assert len(rows) == 1 and rows[0]["user"] == "scripted" and rows[0]["tau2_version"].startswith("26.")
    assert set(rows[0]["eval_pass_hat_k"]) == {"1", "2"} and not list(run.glob("ckpt_*"))
    with pytest.raises(BadInput):
        train(Config(eval_only=True, run_dir=str(run)))
