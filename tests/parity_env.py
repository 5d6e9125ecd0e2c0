"""Does Tau2Env pay what tau2 pays? Gold replays and seeded random trajectories, judged by both on the same messages.

    python -m tests.parity_env --trajectories 2000 --seed 0 --out docs/parity_env.md

Played under the rule of tau2's gym (`agent_may_stop=True`), so that either side ends some of the episodes.

The oracle is tau2's own `evaluate_simulation(..., EvaluationType.ALL)`: it replays the conversation on a fresh
environment and compares hashes of whole databases. Reward and breakdown (db_check, env_assertions, action_checks,
communicate_checks, reward_basis, reward_breakdown, info) must be equal. Only calculate expressions that the bound
refuses are exempt: the generator writes none. Where tau2's evaluator raises (an assertion about a record that is not
there, mock only), there is no verdict to compare; ours must then be 0, and such trajectories are counted apart.
"""
import argparse
import contextlib
import copy
import json
import random
import time
import uuid
from collections import Counter
from types import SimpleNamespace

from env_tau2 import Tau2Env, domain_data, domain_tasks, tau2_version  # first: it keeps tau2 and litellm quiet

import tau2.domains.telecom.tools as telecom_tools
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.domains.telecom.user_tools import TelecomUserTools
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

SHARE = {"retail": 0.20, "airline": 0.05, "telecom": 0.55, "mock": 0.20}  # of the random trajectories
FRESH_VPN = copy.deepcopy(TelecomUserTools.default_vpn_details)
TEXTS = ("One moment, please.", "I can help with that.", "Your total is $1,234.50.", "Is there anything else?", "Done.")
JUNK = ("", "none", "0", 0, 1, -3, 2.5, True, None, [], ["x"], {}, {"a": 1}, "#W0000000", "user_1", "task_9", "1" * 40)


def user_turn(text="", calls=()):
    return SimpleNamespace(text=text, tool_calls=[{"name": n, "arguments": a} for n, a in calls], fault=None)


@contextlib.contextmanager
def as_in_a_fresh_process(env):
    """tau2's replay repeats neither uuid4's draws nor a VPN default that an earlier task broke: give it both.

    The replay draws the bill names of the live episode, in order, and then, for the gold world, real ones.
    """
    live = [bill.bill_id[1:] for bill in getattr(env.world.tools.db, "bills", [])
            if bill.bill_id not in {b.bill_id for b in env.shared.start(env.task)[0].tools.db.bills}]

    def draw():
        return SimpleNamespace(hex=live.pop(0)) if live else uuid.uuid4()

    real, telecom_tools.uuid = telecom_tools.uuid, SimpleNamespace(uuid4=draw)
    TelecomUserTools.default_vpn_details = copy.deepcopy(FRESH_VPN)
    try:
        yield
    finally:
        telecom_tools.uuid = real
        TelecomUserTools.default_vpn_details = copy.deepcopy(FRESH_VPN)


def tau2_verdict(env):
    """tau2's RewardInfo for an ended episode, or the exception that its evaluator raised."""
    reason = {"truncated": TerminationReason.MAX_STEPS, "too_many_errors": TerminationReason.TOO_MANY_ERRORS}.get(
        env.outcome, TerminationReason.USER_STOP)
    run = SimulationRun(id="x", task_id=env.task_id, start_time="", end_time="", duration=0.0, messages=env.judged,
                        termination_reason=reason)
    with as_in_a_fresh_process(env):
        try:
            return evaluate_simulation(run, env.task, EvaluationType.ALL, solo_mode=False, domain=env.domain)
        except (ValueError, AttributeError) as error:  # an assertion about what is not there: a record, the APN settings
            return error


def difference(env):
    """None where both agree; else a text that shows both verdicts. Second value: what to count the episode as."""
    theirs = tau2_verdict(env)
    if isinstance(theirs, Exception):
        return (None if env.reward == 0.0 else f"tau2 raised {theirs}, ours {env.reward}"), "tau2 raised"
    if env.reward_info is None:  # ended without a stop: tau2 gives 0 and no breakdown
        return (None if theirs.reward == env.reward == 0.0 else f"{theirs.reward} {env.reward}"), "no stop"
    expected = theirs.model_dump(mode="json")
    if env.reward_info != expected:
        return f"{env.domain} {env.task_id}\nours   {json.dumps(env.reward_info)}\ntheirs {json.dumps(expected)}", "differs"
    failed = [kind for kind, score in (expected["reward_breakdown"] or {}).items() if score == 0.0]
    return None, "1.0" if theirs.reward == 1.0 else f"{failed[0]} alone" if len(failed) == 1 else "several fail"


def values_seen(domain):
    """{argument name: values in gold actions}: what random arguments are drawn from."""
    seen = {}
    for task in domain_tasks(domain, "base"):
        for action in (task.evaluation_criteria.actions or []) if task.evaluation_criteria else []:
            for name, value in action.arguments.items():
                seen.setdefault(name, []).append(value)
    return seen


def random_call(schemas, seen, rng):
    function = rng.choice(schemas)["function"]
    names = function["parameters"].get("properties", {})
    arguments = {name: rng.choice(seen.get(name) or JUNK) if rng.random() < 0.85 else rng.choice(JUNK)
                 for name in names if rng.random() < 0.95}
    return function["name"], arguments


def changed_arguments(arguments, seen, rng):
    """One argument replaced, retyped, dropped, or one added."""
    arguments = copy.deepcopy(arguments)
    if not arguments or rng.random() < 0.1:
        return {**arguments, rng.choice(["extra", "requestor", "self", "tool_name"]): "user"}
    name = rng.choice(list(arguments))
    value = arguments[name]
    kind = rng.randrange(5)
    if kind == 0:
        del arguments[name]
    elif kind == 1:
        arguments[name] = rng.choice(JUNK)
    elif kind == 2 and isinstance(value, list):
        arguments[name] = rng.sample(value, len(value)) if rng.random() < 0.5 else value[1:]
    elif kind == 3 and isinstance(value, int | float):
        arguments[name] = rng.choice([value + 1, -value, float(value), str(value)])
    else:
        arguments[name] = rng.choice(seen.get(name) or JUNK)
    return arguments


def plan(task, domain, seen, rng, gold=False):
    """A list of (requestor, [(tool, arguments), ...]) or ("text", words), derived from the gold actions."""
    data, criteria = domain_data(domain), task.evaluation_criteria
    steps = [(a.requestor, [(a.name, a.arguments)]) for a in criteria.actions or []]
    info = [("text", words) for words in criteria.communicate_info or []]
    if gold:
        return steps + info
    disturb = rng.choice([0.0, 0.0, 0.1, 0.4])  # a third or so keep every action as it is
    changed = []
    for who, calls in steps:
        dice = rng.random()
        if dice < disturb * 0.4:
            continue
        if dice < disturb * 0.6:
            changed.append((who, calls))
        if dice < disturb * 0.8 and dice >= disturb * 0.6:
            calls = [(calls[0][0], changed_arguments(calls[0][1], seen, rng))]
        if disturb * 0.8 <= dice < disturb:
            schemas = data.user_tools if who == "user" else data.tools
            calls = [(rng.choice(schemas)["function"]["name"], calls[0][1])]
        changed.append((who, calls))
    if rng.random() < disturb:
        rng.shuffle(changed)
    for _ in range(rng.choice([0, 0, 1, 3]) if disturb else rng.choice([0, 0, 0, 1])):
        own = rng.random() < 0.4 and data.user_tools
        changed.insert(rng.randrange(len(changed) + 1), (
            "user" if own else "assistant", [random_call(data.user_tools if own else data.tools, seen, rng)
                                             for _ in range(rng.choice([1, 1, 1, 2]))]))
    if any(t["function"]["name"] == "calculate" for t in data.tools) and rng.random() < 0.2:
        sum_ = f"{rng.randint(1, 99)} {rng.choice('+-*/')} ({rng.randint(0, 9)}.5 - {rng.randint(0, 5)}) ** 2"
        changed.append(("assistant", [("calculate", {"expression": sum_})]))
    if rng.random() < 0.7:
        changed += info
    else:
        changed += [said for said in info if rng.random() < 0.4]
    if rng.random() < 0.1:
        changed = changed[:rng.randrange(len(changed) + 1)]
    return changed


def play(env, task, steps, rng, seed):
    """Drive one episode through begin, act and hear; ends by a user's or the agent's stop unless a limit comes first."""
    env.begin(task.id, seed)
    if env.waiting == "user":
        env.hear(user_turn("Hello, I need help."))
    for who, what in steps:
        if env.outcome is not None:
            return
        if who == "text":
            env.act(f"For your information: {what}.")
            env.hear(user_turn("Thank you."))
        elif who == "user":
            env.act(rng.choice(TEXTS))
            if env.waiting == "user":
                env.hear(user_turn("", what))
            if env.waiting == "user":
                env.hear(user_turn("I did that."))
        else:
            env.act(json.dumps([{"name": name, "arguments": arguments} for name, arguments in what]))
    if env.outcome is None and rng.random() < 0.15:
        env.act("Goodbye. ###STOP###")
    elif env.outcome is None:
        env.act(rng.choice(TEXTS))
        if env.waiting == "user":
            env.hear(user_turn(rng.choice(["Thanks! ###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"])))


def gold_replays(domain):
    """Every base task with its gold actions and all that is to be said. Yields (difference, count as, reward)."""
    env, rng = Tau2Env(domain, split="base", agent_may_stop=True), random.Random(0)
    for task in env.tasks.values():
        play(env, task, plan(task, domain, {}, rng, gold=True), rng, seed=0)
        yield (*difference(env), env.reward)


def random_trajectories(domain, count, seed):
    """Yields (difference, count as, reward) of `count` random episodes; the same seed gives the same ones."""
    env = Tau2Env(domain, split="base", agent_may_stop=True)
    rng = random.Random(f"{domain}/{seed}")
    seen = values_seen(domain)
    tasks = list(env.tasks.values())
    for number in range(count):
        task = rng.choice(tasks)
        play(env, task, plan(task, domain, seen, rng), rng, seed=number)
        yield (*difference(env), env.reward)


def campaign(trajectories, seed, domains=tuple(SHARE), gold=True):
    """Run both parts. Returns (lines of a report, number of differences, counts over the random part)."""
    lines = ["| domain | kind | episodes | differ | reward 1.0 | counts | s |", "|---|---|---|---|---|---|---|"]
    differences, total = [], Counter()
    for domain in domains:
        kinds = [("gold", gold_replays(domain))] if gold else []
        kinds.append(("random", random_trajectories(domain, round(trajectories * SHARE[domain]), seed)))
        for kind, episodes in kinds:
            start, counts, paid = time.perf_counter(), Counter(), 0
            for found, count_as, reward in episodes:
                counts[count_as] += 1
                paid += reward == 1.0
                differences += [found] if found else []
            if kind == "random":
                total += counts
            shown = ", ".join(f"{name}: {n}" for name, n in sorted(counts.items()))
            lines.append(f"| {domain} | {kind} | {sum(counts.values())} | {len(differences)} | {paid} | {shown} | "
                         f"{time.perf_counter() - start:.0f} |")
            print(lines[-1], flush=True)
    return lines, differences, total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--domains", nargs="+", default=list(SHARE))
    parser.add_argument("--out", default=None, help="file for the report")
    args = parser.parse_args()
    lines, differences, total = campaign(args.trajectories, args.seed, args.domains)
    compared = sum(total.values()) - total["tau2 raised"]
    alone = {kind: total[f"{kind} alone"] for kind in ("DB", "COMMUNICATE", "ENV_ASSERTION", "ACTION")}
    lines += ["", f"tau2 {tau2_version()}, seed {args.seed}: {compared} random trajectories compared, "
              f"{len(differences)} differences (gold replays included), {total['1.0'] / max(compared, 1):.0%} earn 1.0, "
              f"failing alone: {alone}."]
    print(lines[-1])
    for found in differences[:5]:
        print(found)
    if args.out:
        with open(args.out, "w") as file:
            command = f"python -m tests.parity_env --trajectories {args.trajectories} --seed {args.seed}"
            file.write(f"# Reward parity with tau2's evaluator\n\n`{command}`\n\n" + "\n".join(lines) + "\n")
    raise SystemExit(1 if differences else 0)


if __name__ == "__main__":
    main()
