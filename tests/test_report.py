"""report.py: rows, statistics against other people's code, plots, and a page that runs no text as script."""
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import report as report_room
from report import (METRICS, append_row, bootstrap_ci, compare_runs, eval_summary, paired_difference, pass_hat_k, plot_run,
                    read_rows, tau2_messages, write_html, write_tau2_results)
from tests.replay_results import replay_file

ROOT = Path(__file__).resolve().parent.parent
PNG = b"\x89PNG\r\n\x1a\n"


def episode(task="1", reward=1.0, outcome="success", sibling=0, text="Hello", **more):
    base = {"task_id": task, "uid": f"0/{task}", "sibling": sibling, "prompt_ids": [1], "response_ids": [2, 3],
            "response_mask": [1, 0], "rollout_log_probs": [-0.1, 0.0], "reward": reward, "outcome": outcome, "turns": 2,
            "fault": None, "messages": [{"role": "assistant", "content": text}], "tokens": [["<|system|>", 0], [text, 1]],
            "reward_info": {"reward": reward, "reward_breakdown": {"DB": reward, "COMMUNICATE": 1.0}, "db_check": None}}
    return base | more


def make_run(path, steps=12, gpu=False, episodes=None, shift=0.0):
    """A run folder as train.py leaves it, with seeded numbers."""
    rng = np.random.default_rng(0)
    (path / "episodes").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"env": "retail", "tasks": "synthetic", "split": "train"}))
    for step in range(steps + 1):
        if step % 6 == 0:
            sampled = [episode(str(t), float(rng.random() < 0.4 + shift), sibling=k) for t in range(12) for k in range(4)]
            (path / f"episodes/eval_{step:06d}_sampled.jsonl").write_text("".join(json.dumps(e) + "\n" for e in sampled))
            append_row(path / "metrics.jsonl", eval_summary(sampled) | {
                "step": step, "eval_greedy": 0.5, "eval_do_nothing": 0.06, "user": "scripted", "policy": "tiny",
                "tau2_version": "26.3", "split": "val"})
        if step:
            append_row(path / "metrics.jsonl", {
                "step": step, "reward_mean": float(rng.random()), "outcome_counts": {"success": 3, "fail": 4, "user_error": 1},
                "zero_variance_groups": 1, "groups": 4, "do_nothing": 0.05, "loss": None, "grad_norm": None,
                "logp_gap_mean": 1e-6, "logp_gap_max": 0.0, "response_tokens": 100.0, "response_tokens_max": 180.0,
                "context_tokens": 700.0, "rss_gib": 1.2, "rollout_peak_gib": 14.0 if gpu else None,
                "update_peak_gib": 22.5 if gpu else None, "vram_total_gib": 32.0 if gpu else None})
    with open(path / "episodes/step_000012.jsonl", "w") as file:
        file.writelines(json.dumps(e) + "\n" for e in episodes or [episode()])
    return path


# ---------------------------------------------------------------- rows

def test_every_metric_is_explained():
    """Guards against a glossary with holes; times and memory must be volatile, or no resumed run equals another."""
    for name, metric in METRICS.items():
        assert metric.meaning and metric.unit, name
        assert metric.volatile or not name.endswith(("_s", "_gib", "_per_s")), name
        assert not metric.volatile or name.endswith(("_s", "_gib")) or name in ("micro_batch_tokens", "micro_batches"), name


def test_an_unlisted_name_is_refused(tmp_path):
    """Guards against metrics that nobody can look up; nothing is written then."""
    with pytest.raises(ValueError, match="rewrad_mean"):
        append_row(tmp_path / "m.jsonl", {"step": 1, "rewrad_mean": 0.5})
    assert not (tmp_path / "m.jsonl").exists()


def test_rows_come_back_and_nan_is_null(tmp_path):
    """Guards against `NaN` in the file, which is no JSON and stops every other reader."""
    rows = [{"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "reward_mean": 1 / 3, "skipped": "ü\u2028"},
            {"step": 2, "outcome_counts": {"success": 1}, "loss": None}]
    for row in rows:
        append_row(tmp_path / "m.jsonl", row)
    assert read_rows(tmp_path / "m.jsonl") == [rows[0] | {"loss": None, "grad_norm": None}, rows[1]]
    assert len((tmp_path / "m.jsonl").read_text(encoding="utf-8").split("\n")) == 3


def test_a_torn_last_line_is_dropped_and_no_other(tmp_path):
    """Guards against a killed run that cannot be read, or read with a row made of half a number: every cut is tried."""
    path = tmp_path / "m.jsonl"
    for step in (1, 2, 30):
        append_row(path, {"step": step, "reward_mean": 0.25 * step})
    whole, rows = path.read_bytes(), read_rows(path)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert read_rows(path) == rows[:whole[:cut].count(b"\n")]
    path.write_bytes(whole.replace(b'"step": 2', b'"step": }'))
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)


# ---------------------------------------------------------------- statistics

def test_pass_hat_k_equals_tau2s():
    """Guards against the biased estimator (mean ** k). Oracle: tau2's own function, and counting all subsets."""
    from itertools import combinations

    from tau2.metrics.agent_metrics import pass_hat_k as tau2s
    for trials in range(1, 7):
        for successes in range(trials + 1):
            for k in range(1, trials + 1):
                subsets = [all(i < successes for i in s) for s in combinations(range(trials), k)]
                assert pass_hat_k(successes, trials, k) == pytest.approx(tau2s(trials, successes, k))
                assert pass_hat_k(successes, trials, k) == pytest.approx(sum(subsets) / len(subsets))
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k = {k}"):
            pass_hat_k(2, 4, k)


def test_bootstrap_equals_scipys():
    """Guards against an interval over episodes instead of tasks, or of the wrong width. Oracle: scipy.stats.bootstrap."""
    from scipy.stats import bootstrap
    for seed, count in ((0, 20), (1, 200)):
        means = np.random.default_rng(seed).choice([0, 0.25, 0.5, 1.0], size=count)
        low, high = bootstrap_ci(means, seed=3)
        theirs = bootstrap((means,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(5))
        assert low == pytest.approx(theirs.confidence_interval.low, abs=0.012)
        assert high == pytest.approx(theirs.confidence_interval.high, abs=0.012)
        assert bootstrap_ci(means, seed=3) == (low, high) and low < means.mean() < high
    assert bootstrap_ci([0.5]) == (0.5, 0.5)
    with pytest.raises(ValueError):
        bootstrap_ci([])


def test_bootstrap_covers_the_truth():
    """Guards against intervals that promise 95 % and hold far less: 200 draws of 60 tasks from a known mean."""
    rng = np.random.default_rng(7)
    held = 0
    for draw in range(200):
        low, high = bootstrap_ci(rng.beta(0.5, 0.8, size=60), seed=draw, resamples=1000)
        held += low <= 0.5 / 1.3 <= high
    assert 0.90 <= held / 200 <= 0.99


def test_paired_difference():
    """Guards against comparing runs on different tasks, and against an interval that ignores the pairing."""
    assert paired_difference({"x": 0, "y": 1}, {"x": 0.5, "y": 1, "z": 0})[0] == 0.25
    easy = {str(i): float(i % 2) for i in range(100)}
    better = {k: v + 0.1 for k, v in easy.items()}
    difference, low, high = paired_difference(easy, better)  # unpaired, the interval would be 0.1 +- 0.14
    assert difference == pytest.approx(0.1) and low == pytest.approx(0.1) and high == pytest.approx(0.1)
    assert paired_difference(better, easy)[0] == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="no evaluated task in common"):
        paired_difference({"a": 1.0}, {"b": 1.0})


def test_eval_summary_by_hand():
    """Guards against faults counted as failures, and tasks with fewer valid trials weighing less."""
    episodes = [episode("a", 1.0), episode("a", 0.0, "fail"), episode("a", 0.0, "user_error"),
                episode("b", 1.0), episode("b", 1.0), episode("b", 1.0), episode("c", 0.0, "env_error"),
                episode("d", 0.5, "fail"), episode("d", 0.0, "truncated"), episode("d", 0.0, "too_many_errors")]
    summary = eval_summary(episodes)
    assert summary["eval_mean_at_1"] == pytest.approx((1 / 2 + 1 + 1 / 6) / 3)
    assert summary["eval_mean_faults_zero"] == pytest.approx((1 / 3 + 1 + 0 + 1 / 6) / 4)
    assert summary["eval_tasks"] == 3 and summary["eval_faults"] == 2
    # a: 1 of 2, b: 3 of 3, d: 0 of 3 (a reward of 0.5 is no success)
    assert summary["eval_pass_hat_k"] == {"1": pytest.approx((0.5 + 1 + 0) / 3), "2": pytest.approx((0 + 1 + 0) / 3),
                                          "3": pytest.approx((1 + 0) / 2)}
    assert summary["eval_outcome_counts"] == {"env_error": 1, "fail": 2, "success": 4, "too_many_errors": 1,
                                              "truncated": 1, "user_error": 1}
    low, high = summary["eval_ci95"]
    assert 1 / 6 - 1e-9 <= low < summary["eval_mean_at_1"] < high <= 1
    assert set(summary) <= set(METRICS)


def test_eval_summary_where_everything_faulted():
    """Guards against a division by zero, or a reward of 0 made of a dead user model."""
    summary = eval_summary([episode("a", 0.0, "user_error")] * 3)
    assert summary["eval_mean_at_1"] is None and summary["eval_ci95"] is None and summary["eval_pass_hat_k"] == {}
    assert summary["eval_faults"] == 3 and summary["eval_mean_faults_zero"] == 0.0


def test_compare_runs(tmp_path):
    """Guards against a comparison without interval, without the user's name, or of the wrong sign."""
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", shift=0.5)
    text = compare_runs(a, b)
    difference = float(re.search(r"common tasks: ([+-][\d.]+)", text).group(1))
    low, high = map(float, re.search(r"95 % \[([+-][\d.]+), ([+-][\d.]+)\]", text).groups())
    means = [r["eval_mean_at_1"] for p in (a, b) for r in [[x for x in read_rows(p / "metrics.jsonl")
                                                            if "eval_mean_at_1" in x][-1]]]
    assert difference == pytest.approx(means[1] - means[0], abs=1e-3) and 0 < low < difference < high
    assert "12 common tasks" in text and text.count("user scripted") == 2 and "0 lies outside" in text
    assert "0 lies inside" in compare_runs(a, a)


# ---------------------------------------------------------------- plots

@pytest.mark.parametrize("steps, gpu", [(0, False), (1, False), (12, False), (60, True)])
def test_plot_of_any_run(tmp_path, steps, gpu):
    """Guards against a plot that fails on the first row, on a CPU's nulls or on a long run."""
    run = make_run(tmp_path / "run", steps=steps, gpu=gpu)
    assert plot_run(run) == run / "plots.png"
    data = (run / "plots.png").read_bytes()
    assert data.startswith(PNG) and data.rstrip(b"\0").endswith(b"IEND\xaeB`\x82") and len(data) > 10_000
    assert not list(run.glob(".*"))


def test_plot_without_any_row(tmp_path):
    """Guards against a run stopped before its first row that cannot be looked at."""
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_run(tmp_path).read_bytes().startswith(PNG)


def test_plot_shows_what_the_rows_say(tmp_path, monkeypatch):
    """Guards against a curve fed by the wrong column: the lines on the axes hold the numbers of the rows."""
    from matplotlib.figure import Figure
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kw: (drawn.append(self), Path(path).write_bytes(PNG))[0])
    run = make_run(tmp_path / "run", gpu=True)
    plot_run(run)
    rows = read_rows(run / "metrics.jsonl")
    lines = {(axis.get_title(), line.get_label()): list(line.get_ydata()) for axis in drawn[0].axes for line in axis.lines}
    for key, name in ((("Reward", "train"), "reward_mean"), (("Reward", "do nothing, validation"), "eval_do_nothing"),
                      (("Peak memory", "rollout, GPU"), "rollout_peak_gib"), (("Peak memory", "card"), "vram_total_gib"),
                      (("Peak memory", "update, GPU"), "update_peak_gib"), (("Length", "sampled, mean"), "response_tokens")):
        assert lines[key] == [r[name] for r in rows if r.get(name) is not None], name
    axes = {axis.get_title(): axis for axis in drawn[0].axes}
    (bar,) = axes["Reward"].containers
    assert list(bar.lines[0].get_ydata()) == [r["eval_mean_at_1"] for r in rows if "eval_mean_at_1" in r]
    ends = [segment[:, 1].tolist() for segment in bar.lines[2][0].get_segments()]
    assert np.allclose(ends, [r["eval_ci95"] for r in rows if "eval_ci95" in r])
    heights = {c.get_label(): c.patches[0].get_height() for c in axes["Outcomes"].containers}
    assert heights == {"success": 3 / 8, "fail": 4 / 8, "user_error": 1 / 8}
    assert "Log-prob gap" in axes


# ---------------------------------------------------------------- the page

FUZZ = ["<script>alert('pwned')</script>", "</script><script>document.title='pwned'</script>",
        "<img src=x onerror=\"document.title='pwned'\">", "\"><svg onload=document.title='pwned'>",
        "' onmouseover='document.title=1' x='", "</pre></div></details><h1>broken</h1>", "<!-- ", "]]>", "&lt;b&gt; &amp;",
        "{\"name\": \"</script>\"}", "\x00\x01\x1b[31m", "\ud800 lone", "\u202eright to left", "a" * 5000, "", "```\n{{7*7}}",
        "<style>*{display:none}</style>", "<meta http-equiv=refresh content='0;url=//x.invalid'>", "javascript:alert(1)",
        "<iframe src='file:///etc/passwd'></iframe>", "<base href='//x.invalid/'>", "<mark>fake</mark>"]


def hostile(text):
    """An episode in which every field that a model, a user, a tool or a task can fill holds the text."""
    call = {"name": text, "arguments": {text: [text]}}
    return episode(task=text, outcome="fail", text=text, fault=text, tokens=[[text, 1], [text, 0]], messages=[
        {"role": "assistant", "content": text, "tool_calls": [call]}, {"role": "tool", "name": text, "content": text},
        {"role": "user", "content": None}], reward_info={"reward_breakdown": {text: 1.0}, "info": {"note": text}})


class Reader(HTMLParser):
    """Collects tags, and the text outside script and style."""
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.inside = [], "", []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        if not set(self.inside) & {"script", "style"}:
            self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """report.html of a run whose episodes are hostile, beside two plain ones."""
    run = make_run(tmp_path_factory.mktemp("page") / "run<b>&", steps=2, episodes=[
        *map(hostile, FUZZ), episode("task 7", text="Plain text"), episode("task 7", 0.0, "truncated", 1)])
    for file in run.glob("episodes/eval_*"):
        file.unlink()
    return write_html(run)


def test_all_text_is_escaped(page):
    """Guards against model, user or tool text that becomes markup: the page has our tags and no others."""
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    names = [tag for tag, _ in reader.tags]
    assert names.count("script") == 1 and names.count("img") == 1 and names.count("style") == 1 and names.count("meta") == 2
    assert not set(names) & {"svg", "iframe", "base", "link", "object", "embed", "form"} and names.count("h1") == 1
    assert not [a for _, attrs in reader.tags for a in attrs if a.startswith("on")]
    assert names.count("mark") == 1 + len(FUZZ) + 2  # the legend, and one sampled piece an episode
    assert reader.text.count("run<b>&") == 2  # the folder's name, in title and heading
    for text in FUZZ[:10]:
        assert text in reader.text
    assert all(attrs["src"].startswith("data:image/png") for tag, attrs in reader.tags if tag == "img")


def test_the_page_needs_no_network(page):
    """Guards against a page that calls home: no address in it but data, and a policy that forbids requests."""
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    policy = next(a["content"] for t, a in reader.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "unsafe-inline' script" not in policy and "script-src 'sha256-" in policy
    assert not [a for t, a in reader.tags for k, v in a.items() if k in ("href", "src") and not v.startswith("data:")]


def test_page_holds_conversation_reward_and_marked_tokens(tmp_path):
    """Guards against an episode one cannot understand: calls, results, reward breakdown, sampled tokens are there."""
    talk = episode("42", 0.0, "fail", tokens=[["<|user|>hi", 0], ["sampled words", 1]], messages=[
        {"role": "user", "content": "Cancel #W1"}, {"role": "tool", "name": "cancel_order", "content": "ok & done"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "cancel_order", "arguments": {"order_id": "#W1"}}]}])
    text = write_html(make_run(tmp_path / "run", episodes=[talk])).read_text()
    assert "cancel_order({&quot;order_id&quot;: &quot;#W1&quot;})" in text and "ok &amp; done" in text
    assert "<mark>sampled words</mark>" in text and "<mark>&lt;|user|&gt;hi" not in text
    assert "DB 0.0" in text and "&quot;reward_breakdown&quot;" in text
    assert "user scripted" in text and "tau2 26.3" in text


def test_page_shows_the_newest_and_says_how_many(tmp_path):
    """Guards against a page of gigabytes, and against one that leaves episodes out without a word."""
    run = make_run(tmp_path / "run", episodes=[episode(f"old {i}") for i in range(5)])
    (run / "episodes/step_000013.jsonl").write_text("".join(json.dumps(episode(f"new {i}")) + "\n" for i in range(3)))
    text = write_html(run, limit=4).read_text()
    total = 5 + 3 + 3 * 48
    assert f"The 4 newest of {total}" in text and "new 2" in text and "old 4" not in text


def chromium():
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if shutil.which(name):
            return shutil.which(name)
    pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")


def dump_dom(address, profile):
    """The page after its scripts have run, as headless Chromium sees it."""
    done = subprocess.run([chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                           "--disable-background-networking", f"--user-data-dir={profile}", "--virtual-time-budget=2000",
                           "--dump-dom", address], capture_output=True, text=True, timeout=120)
    assert "<html" in done.stdout, done.stderr[-500:]
    return done.stdout


def test_hostile_page_runs_no_script_in_chromium(page, tmp_path):
    """Guards against what a parser of ours may miss: the browser itself finds no element and no title of the attacks,
    shows their text, and runs the page's own filter."""
    dom = dump_dom(page.as_uri(), tmp_path / "profile")
    title = re.search(r"<title>(.*?)</title>", dom, re.S).group(1)
    assert title.startswith("run&lt;b&gt;&amp;") and "pwned" not in title
    assert len(re.findall(r"<script", dom)) == 1 and not re.findall(r"<(svg|iframe|base|h1>broken)", dom)
    assert "&lt;script&gt;alert('pwned')&lt;/script&gt;" in dom
    count = len(FUZZ) + 2
    assert f'<span id="count">{count}</span>' in dom and dom.count('class="episode"') == count


def test_an_unescaped_page_would_run_in_chromium(page, tmp_path):
    """Guards the test above: without escaping and policy the same text does run, so that test can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><html><head><title>fine</title></head><body>" + FUZZ[1] + "</body></html>")
    assert "<title>pwned</title>" in dump_dom(bad.as_uri(), tmp_path / "profile")
    # ... and the policy alone stops it, should one text ever slip through.
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="[^"]*">', page.read_text()).group()
    bad.write_text(bad.read_text().replace("<title>", policy + "<title>"))
    assert "<title>fine</title>" in dump_dom(bad.as_uri(), tmp_path / "profile")


def test_filters_work_in_chromium(page, tmp_path):
    """Guards against a filter that hides nothing, or everything. The page cannot be clicked from here, so a copy of
    its markup and of its own script, with a last line that chooses, stands in."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<meta http-equiv[^>]*>", "", text, count=1)  # or the added line would be refused, as it should be
    choose = ("const s=document.getElementById('KEY');s.value='VALUE';s.dispatchEvent(new Event('change'));")
    for key, value, expected in (("outcome", "truncated", 1), ("outcome", "success", 1), ("task", "task 7", 2),
                                 ("outcome", "fail", len(FUZZ)), ("file", "step_000012", len(FUZZ) + 2)):
        copy = tmp_path / "copy.html"
        copy.write_text(text.replace("</body>", "<script>" + choose.replace("KEY", key).replace("VALUE", value) + "</script></body>"),
                        encoding="utf-8")
        dom = dump_dom(copy.as_uri(), tmp_path / "profile")
        assert f'<span id="count">{expected}</span>' in dom, (key, value)
        assert len(re.findall(r'class="episode"[^>]*hidden', dom)) == len(FUZZ) + 2 - expected


# ---------------------------------------------------------------- command line

def command(*words):
    return subprocess.run([sys.executable, str(ROOT / "report.py"), *map(str, words)], capture_output=True, text=True)


def test_a_negative_limit_is_refused(tmp_path):
    """`--limit -5` showed all episodes but the five oldest: a slice, not a limit."""
    done = command(tmp_path, "--html", "--limit", "-5")
    assert done.returncode == 2 and "'-5' is no whole number" in done.stderr and "Traceback" not in done.stderr


def test_command_line(tmp_path):
    """Guards against a README command that does not run; bad input is one line and exit code 2, no traceback."""
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    done = command(run, "--html", "--compare", other)
    assert done.returncode == 0, done.stderr
    assert "common tasks" in done.stdout and (run / "report.html").exists() and (run / "plots.png").exists()
    for words in ((tmp_path / "nothing",), (run, "--compare", tmp_path / "nothing")):
        done = command(*words)
        assert done.returncode == 2 and "nothing" in done.stderr and "Traceback" not in done.stderr


def test_import_costs_no_plot_library():
    """Guards against a second of start-up for every command, and against a backend chosen at import."""
    done = subprocess.run([sys.executable, "-c", "import sys, report; print('matplotlib' in sys.modules)"], cwd=ROOT,
                          capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "False", done.stderr
    assert math.isfinite(report_room.bootstrap_ci([0.0, 1.0])[0])


# ---------------------------------------------------------------- tau2's own files

def tau2_run(path, domain="mock", spoiled=()):
    """A run folder with an evaluation of 8 tasks (and one that faults spoiled) in 4 trials, played on Tau2Env."""
    from env_tau2 import Tau2Env, domain_tasks, tau2_version
    from tests.parity_env import plan, play, values_seen
    tasks = domain_tasks(domain, "base")[:9]
    rng, seen, episodes = random.Random(3), values_seen(domain), []
    for number, task in enumerate(tasks):
        for trial in range(4):
            env = Tau2Env(domain, tasks=[task], max_steps=200 if rng.random() < 0.8 else 3)
            gold = rng.random() < 0.7
            play(env, task, plan(task, domain, seen, rng, gold=gold), rng, seed=number)
            if env.outcome is None:  # the agent's stop word is a text
                env.hear(SimpleNamespace(text="###STOP###", tool_calls=[], fault=None))
            fault = number == 8 or (number, trial) in spoiled
            episodes.append(episode(task.id, 0.0 if fault else env.reward, "user_error" if fault else env.outcome,
                                    trial, messages=env.transcript, reward_info=env.reward_info, seed=number))
    (path / "episodes").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"env": domain, "seed": 0}))
    (path / "eval_tasks.json").write_text(json.dumps([task.model_dump(mode="json") for task in tasks]))
    (path / "episodes/eval_000004_sampled.jsonl").write_text("".join(json.dumps(e) + "\n" for e in episodes))
    append_row(path / "metrics.jsonl", eval_summary(episodes) | {
        "step": 4, "user": "scripted", "policy": "tiny", "tau2_version": tau2_version(), "split": "base", "env": domain,
        "eval_trials": 4})
    return eval_summary(episodes)


@pytest.mark.parametrize("domain, spoiled", [("mock", ()), ("telecom", ()), ("mock", ((0, 1), (2, 3)))])
def test_tau2_reads_our_evaluation_and_counts_alike(tmp_path, domain, spoiled):
    """Guards a score that tau2's own commands would not give; tau2's loader and metrics are the oracle."""
    from tau2.data_model.simulation import Results
    from tau2.metrics.agent_metrics import compute_metrics
    ours = tau2_run(tmp_path / "run", domain, spoiled)
    said = write_tau2_results(tmp_path / "run", tmp_path / "results.json")
    whole = 32 - len(spoiled)
    assert f"{whole} simulations of 8 tasks" in said and f"{4 + len(spoiled)} of 36 episodes" in said
    results = Results.load(tmp_path / "results.json")
    theirs = compute_metrics(results)
    assert len(results.simulations) == whole and set(theirs.pass_hat_ks) == set(range(1, 4 if spoiled else 5))
    for k, share in theirs.pass_hat_ks.items():
        if not spoiled or k == 1:  # beyond, ours is over the tasks with k whole trials and tau2's over all: same here
            assert share == pytest.approx(ours["eval_pass_hat_k"][str(k)], abs=1e-12)
    assert 0 < theirs.pass_hat_ks[1] < 1
    if not spoiled:
        assert theirs.avg_reward == pytest.approx(ours["eval_mean_at_1"], abs=1e-12)


@pytest.mark.parametrize("domain", ["mock", "telecom"])
def test_our_results_file_replays_to_the_same_rewards(tmp_path, domain):
    """Guards the file's messages: a lost call, id or flag would make tau2's evaluator give another reward."""
    tau2_run(tmp_path / "run", domain)
    write_tau2_results(tmp_path / "run", tmp_path / "results.json")
    counts = replay_file(tmp_path / "results.json")
    raised = 32 - counts["tau2_as_recorded"]  # an assertion about a missing record: ours is 0, tau2's evaluator raises
    assert counts["simulations"] == counts["ours_as_recorded"] == 32 and counts["refused"] == 0
    assert counts["ours_as_tau2"] == 32 - raised and raised <= (4 if domain == "mock" else 0)


def test_malformed_turns_are_not_among_tau2s_messages():
    """Guards tau2's replay: a tool answer without a call is refused there, and no verdict saw the turn here."""
    from env_tau2 import Tau2Env
    env = Tau2Env("mock", split="base")
    env.begin("create_task_1", 0)
    env.hear(SimpleNamespace(text="Hello", tool_calls=[], fault=None))
    for action in ("{broken", json.dumps([{"name": "get_users", "arguments": {}}, {"name": "fly", "arguments": {}}]), "Hi"):
        env.act(action)

    def essence(message):
        calls = [(c.name, c.arguments, c.requestor) for c in getattr(message, "tool_calls", None) or []]
        return message.role, message.content, calls, getattr(message, "error", None), getattr(message, "requestor", None)
    assert [essence(m) for m in tau2_messages(json.loads(json.dumps(env.transcript)))] == [essence(m) for m in env.judged]


def test_a_run_without_an_evaluation_has_no_results_file(tmp_path):
    """Guards a clear line instead of a stack trace."""
    with pytest.raises(ValueError, match="eval-only"):
        write_tau2_results(make_run(tmp_path / "run"), tmp_path / "x.json")
