"""run_folder.py: when a plot is drawn, and which policy is kept as the best."""
import json

import pytest

import run_folder
from model import load_policy
from report import best_evaluation, best_line
from run_folder import Plotter, keep_best
from tests.test_model import make_folder


def test_plots_are_at_most_one_in_thirty_seconds(tmp_path, monkeypatch):
    """A plot after every step took half a second of six, and 3.7 s of each after a thousand steps."""
    clock = [100.0]
    drawn = []
    monkeypatch.setattr(run_folder.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run_folder, "plot_run", lambda run: drawn.append(clock[0]))
    plotter = Plotter(tmp_path)
    for _ in range(20):  # a step every 6 s: 120 s in all
        clock[0] += 6.0
        plotter.draw()
    assert drawn == [130.0, 160.0, 190.0, 220.0]
    plotter.draw(now=True)  # an evaluation, an interrupt, the end
    assert drawn[-1] == 220.0 and len(drawn) == 5
    clock[0] += 29.0
    plotter.draw()
    assert len(drawn) == 5  # the forced one counts


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return load_policy(str(make_folder(tmp_path_factory.mktemp("m") / "small", words=("<|tiny|>",))))


def test_the_best_policy_is_kept_and_named(tmp_path, policy):
    """A run whose reward fell at the end kept only its last policy. Of equals the first stays; a stored one of a step
    that is done again after a resume is overwritten; an evaluation that faulted throughout keeps nothing."""
    kept = []
    for step, score in ((0, None), (0, 0.2), (8, 0.7), (16, 0.7), (24, 0.5), (8, 0.4), (16, 0.3)):
        weight = next(p for p in policy.model.parameters() if p.requires_grad)
        weight.data.fill_(float(step + 1))
        keep_best(tmp_path, policy, {"step": step, "eval_mean_at_1": score})
        best = best_evaluation(tmp_path)
        kept.append(best and best["step"])
        if best and best["step"] == step:
            stored = load_policy(str(tmp_path / "policy_best"))
            assert (next(p for p in stored.model.parameters() if p.requires_grad) == step + 1).all()
    assert kept == [None, 0, 8, 8, 8, 8, 8]
    assert best_evaluation(tmp_path) == {"step": 8, "eval_mean_at_1": 0.4}
    assert best_line(tmp_path) == "best evaluation: step 8, mean@1 0.400, kept in policy_best"
    assert "evaluation.json" in json.loads((tmp_path / "policy_best/manifest.json").read_text())
    assert best_line(tmp_path / "no") == ""
