"""Replays a results file of tau2 through Tau2Env: how many of its rewards does our environment give again?

    python -m tests.replay_results FILE [FILE ...]

Every message of the agent and of the user is played as it stands; the tools run here. Three rewards are compared: the
recorded one, ours, and that of tau2's evaluator, run here on the recorded messages. Each difference is printed with
its cause: the first tool answer that differs from the recorded one, or the parts of the reward that do.
A simulation that did not end by a stop is worth 0 in tau2; here it is cut where its messages end.
"""
import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from env_tau2 import Tau2Env  # first: it keeps tau2 quiet

from tau2.data_model.simulation import Results
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tests.parity_env import as_in_a_fresh_process, user_turn

STOPS = ("user_stop", "agent_stop")


def as_action(message) -> str:
    """A recorded message of the agent in our action grammar."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls or []]
    return json.dumps({"content": message.content, "tool_calls": calls})


def replay(env, simulation) -> str | None:
    """Play a recorded conversation. Returns: the first thing that went another way than recorded, or None."""
    env.begin(simulation.task_id, simulation.seed or 0)
    news = simulation.messages[len(env.judged):]
    for message in news:
        if message.role == "tool":
            continue
        if env.outcome is not None:
            return f"the episode was over ({env.outcome}) before {message.role}: {str(message.content)[:80]!r}"
        if message.role == "assistant":
            env.act(as_action(message))
        else:
            env.hear(user_turn(message.content or "", [(c.name, c.arguments) for c in message.tool_calls or []]))
    if env.outcome is None:
        env.fail("truncated", f"recorded end: {simulation.termination_reason.value}")
    recorded = [message.content for message in simulation.messages if message.role == "tool"]
    answers = [message.content for message in env.judged if message.role == "tool"]
    for ours, theirs in zip(answers, recorded):
        if ours != theirs:
            return f"a tool answered {ours[:80]!r}, recorded {theirs[:80]!r}"
    return None if len(answers) == len(recorded) else f"{len(answers)} tool answers, recorded {len(recorded)}"


def verdict_here(env, simulation) -> float | None:
    """The reward that tau2's own evaluator gives here; None where it raises."""
    with as_in_a_fresh_process(env):
        try:
            return evaluate_simulation(simulation, env.task, EvaluationType.ALL, solo_mode=False, domain=env.domain).reward
        except Exception as error:
            print(f"  {simulation.id}: tau2's evaluator raised {type(error).__name__}: {str(error)[:150]}")
            return None


def replay_file(path: Path) -> dict:
    """{"simulations", "ours_as_recorded", "tau2_as_recorded", "ours_as_tau2", "refused"}; prints the differences."""
    results = Results.load(path)
    tasks = {task.id: task for task in results.tasks}
    counts = dict.fromkeys(("simulations", "ours_as_recorded", "tau2_as_recorded", "ours_as_tau2", "refused"), 0)
    for simulation in results.simulations:
        counts["simulations"] += 1
        env = Tau2Env(results.info.environment_info.domain_name, tasks=[tasks[simulation.task_id]], max_steps=10 ** 6,
                      max_errors=10 ** 6, agent_may_stop=simulation.termination_reason.value == "agent_stop")
        try:
            different = replay(env, simulation)
        except ValueError as error:  # a task that needs a judge
            counts["refused"] += 1
            print(f"  {simulation.id}: not played: {error}")
            continue
        recorded = simulation.reward_info.reward if simulation.reward_info else None
        ours = env.reward if simulation.termination_reason.value in STOPS else 0.0
        theirs = verdict_here(env, simulation)
        counts["ours_as_recorded"] += ours == recorded
        counts["tau2_as_recorded"] += theirs == recorded
        counts["ours_as_tau2"] += ours == theirs
        if not ours == recorded == theirs:
            parts = (env.reward_info or {}).get("reward_breakdown")
            print(f"  {simulation.id}: ours {ours}, recorded {recorded}, tau2 here {theirs}; outcome {env.outcome} "
                  f"{env.fault or ''}; parts {parts}; {different or 'every tool answered as recorded'}")
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        counts = replay_file(path)
        played = counts["simulations"] - counts["refused"]
        print(f"{path}: {counts['ours_as_recorded']} of {played} rewards as recorded, {counts['ours_as_tau2']} as tau2's "
              f"evaluator here ({counts['tau2_as_recorded']} of its own as recorded), {counts['refused']} not played")


if __name__ == "__main__":
    main()
