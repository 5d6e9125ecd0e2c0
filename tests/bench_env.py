"""What does an episode cost? Tau2Env beside tau2's own AgentGymEnv, same tasks, same gold actions, same user, one run.

    python -m tests.bench_env retail --tasks 8 --out docs/bench_env.md

Both are driven through reset() and step(). The user is scripted in both (in tau2's gym it stands in for the language
model), so that only the environments are timed. The last line of standard output is JSON.
"""
import argparse
import json
import random
import statistics
import time

from env_tau2 import Tau2Env, domain_tasks, tau2_version  # first: it keeps tau2 and litellm quiet

import tau2.user.user_simulator as tau2_user
from tau2.data_model.message import AssistantMessage, ToolCall
from tau2.gym.gym_agent import AgentGymEnv

from tests.parity_env import plan, user_turn


class Lines:
    """A user who reads out prepared turns."""

    def __init__(self):
        self.turns = []

    def reply(self, conversations):
        return [self.turns.pop(0)]

    def generate(self, model, messages, tools=None, **settings):
        """The same for tau2's user simulator, in place of its language model."""
        turn = self.turns.pop(0)
        calls = [ToolCall(id=f"u{len(self.turns)}", **call) for call in turn.tool_calls] or None
        return AssistantMessage(role="assistant", content=turn.text or None, tool_calls=calls)


def gold_script(task, domain):
    """(actions of the policy, turns of the user) that play the gold actions; the last action ends the episode."""
    actions, turns = [], [user_turn("Hello, I need help.")]
    for who, what in plan(task, domain, {}, random.Random(0), gold=True):
        if who == "assistant":
            actions += [json.dumps({"name": name, "arguments": arguments}) for name, arguments in what]
        elif who == "user":
            actions.append("Please do that.")
            turns += [user_turn("", what), user_turn("I did that.")]
        else:
            actions.append(f"For your information: {what}.")
            turns.append(user_turn("Thank you."))
    return [*actions, "That is all."], [*turns, user_turn("###STOP###")]


def timed_episode(env, lines, actions, turns, **reset_arguments):
    """Seconds {"reset", "tools": [...], "end", "episode"} and the reward of one gold episode."""
    lines.turns = list(turns)
    seconds, begun = {"tools": []}, time.perf_counter()
    env.reset(**reset_arguments)
    seconds["reset"] = time.perf_counter() - begun
    for action in actions:
        start = time.perf_counter()
        _, reward, terminated, _, _ = env.step(action)
        took = time.perf_counter() - start
        if action.startswith("{"):
            seconds["tools"].append(took)
        if terminated:
            seconds["end"] = took
    seconds["episode"] = time.perf_counter() - begun
    return seconds, reward


def bench(domain, count):
    """{"ours": ..., "tau2": ...}: medians in ms over `count` tasks, and the median ratio of whole episodes."""
    tasks = [t for t in domain_tasks(domain, "base") if t.evaluation_criteria and t.evaluation_criteria.actions]
    tasks = tasks[::max(1, len(tasks) // count)][:count]
    lines, logs = Lines(), {"ours": [], "tau2": []}
    tau2_user.generate = lines.generate
    ours = Tau2Env(domain, split="base", user=lines)
    ours.begin(tasks[0].id, 0)  # the domain is loaded once in a process; tau2 loads it again for every episode
    for task in tasks:
        actions, turns = gold_script(task, domain)
        for _ in range(2):  # the first builds the task's start and gold end, which stay; training visits a task often
            log, reward = timed_episode(ours, lines, actions, turns, options={"task_id": task.id})
        theirs, their_reward = timed_episode(AgentGymEnv(domain, task.id, max_steps=200), lines, actions, turns)
        assert reward == their_reward == 1.0, f"{task.id}: {reward} {their_reward}"
        logs["ours"].append(log)
        logs["tau2"].append(theirs)
    result = {"domain": domain, "tau2_version": tau2_version(), "tasks": len(tasks)}
    for name, log in logs.items():
        tools = [t for entry in log for t in entry["tools"]]
        result[name] = {f"{key}_ms": round(1e3 * statistics.median(e[key] for e in log), 3) for key in ("reset", "end", "episode")}
        result[name]["tool_step_ms"] = round(1e3 * statistics.median(tools), 3) if tools else None
    result["episode_ratio"] = round(statistics.median(
        b["episode"] / a["episode"] for a, b in zip(logs["ours"], logs["tau2"])), 1)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("domain", choices=["retail", "airline", "telecom", "mock"])
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--out", default=None, help="append a line of the table to this Markdown file")
    args = parser.parse_args()
    result = bench(args.domain, args.tasks)
    ours, theirs = result["ours"], result["tau2"]
    row = [args.domain, result["tasks"]]
    for key in ("reset_ms", "tool_step_ms", "end_ms", "episode_ms"):
        row.append(f"{ours[key]} / {theirs[key]}")
    line = "| " + " | ".join(map(str, [*row, f"{result['episode_ratio']}x"])) + " |"
    print("| domain | tasks | reset ms (ours / tau2) | tool step ms | end ms | gold episode ms | cheaper |\n" + line)
    if args.out:
        with open(args.out, "a") as file:
            file.write(line + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
