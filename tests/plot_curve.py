"""The README's picture: validation mean@1 by step of several runs, and of a control run. Reads files only.

    python -m tests.plot_curve runs/seed-0 runs/seed-1 runs/seed-2 --control runs/shuffled-0 --out docs/curve.png
"""
import argparse
from pathlib import Path

from matplotlib.figure import Figure

from report import read_rows


def evaluations(run: str) -> list[dict]:
    return [row for row in read_rows(Path(run) / "metrics.jsonl") if row.get("eval_mean_at_1") is not None]


def plot_curve(runs: list[str], control: str | None, out: str) -> None:
    """Sampled mean@1 with its 95 % interval over tasks, greedy dotted, do-nothing score dashed."""
    figure = Figure(figsize=(8.2, 3.9), dpi=120, layout="constrained")
    axis = figure.subplots()
    colours = ["#2f6db3", "#2a9d5c", "#8f7fc0", "#d9a13b"]
    for i, run in enumerate(runs + ([control] if control else [])):
        rows, is_control = evaluations(run), run == control
        colour = "#c9602b" if is_control else colours[i % len(colours)]
        steps, means = [r["step"] for r in rows], [r["eval_mean_at_1"] for r in rows]
        errors = [[m - r["eval_ci95"][0] for m, r in zip(means, rows)], [r["eval_ci95"][1] - m for m, r in zip(means, rows)]]
        axis.errorbar([s + 0.12 * i for s in steps], means, errors, color=colour, marker="o", capsize=3,
                      label="control: advantages shuffled" if is_control else f"seed {i}")
        axis.plot(steps, [r["eval_greedy"] for r in rows], color=colour, linestyle=":", linewidth=1)
    axis.plot(steps, [r["eval_do_nothing"] for r in rows], color="black", linestyle="--", label="doing nothing")
    axis.set(xlabel="GRPO step (128 conversations each)", ylabel="validation mean@1", ylim=(-0.02, 1),
             title=f"Held-out retail customers, {rows[0]['eval_tasks']} tasks, scripted user (dotted: greedy)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, loc="upper left", framealpha=0.9)
    figure.savefig(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--control")
    parser.add_argument("--out", default="docs/curve.png")
    args = parser.parse_args()
    plot_curve(args.runs, args.control, args.out)
