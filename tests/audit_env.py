"""What is wrong with a benchmark before a policy is trained on it: tasks that pay for nothing, gold that fails.

    python -m tests.audit_env retail --out docs/audit_retail.md

Nothing is patched here: the environment pays what tau2 pays. The `*_clean` splits leave out the tasks that pay for
doing nothing; the rest is to be known when a number is read.
"""
import argparse
import json
import random

from env_tau2 import Tau2Env, copy_world, do_nothing_reward, domain_data, domain_tasks, tau2_version

from tests.parity_env import plan, play, user_turn


def gold_errors(domain):
    """{task id: [(tool, write or read, error)]} of gold actions that raise; tau2's evaluator passes them over."""
    data, found = domain_data(domain), {}
    for task in domain_tasks(domain, "base"):
        world = copy_world(data.start(task)[0])
        for action in (task.evaluation_criteria.actions or []) if task.evaluation_criteria else []:
            kit = world.user_tools if action.requestor == "user" else world.tools
            try:
                world.make_tool_call(action.name, requestor=action.requestor, **action.arguments)
            except Exception as error:
                kind = kit.tool_type(action.name).value if kit.has_tool(action.name) else "unknown"
                found.setdefault(task.id, []).append((action.name, kind, str(error)))
    return found


def gold_below_one(domain):
    """{task id: reward breakdown} of gold replays (with all that is to be said) that tau2 does not pay in full."""
    env, rng, below = Tau2Env(domain, split="base"), random.Random(0), {}
    for task in env.tasks.values():
        play(env, task, plan(task, domain, {}, rng, gold=True), rng, seed=0)
        if env.reward < 1.0:
            below[task.id] = env.reward_info["reward_breakdown"] if env.reward_info else env.outcome
    return below


def attempt(env, task_id, actions):
    """The reward of a policy that plays fixed actions and then stops, with a user that only says yes."""
    env.begin(task_id, 0)
    for action in [None, *actions, "###STOP###"]:
        while env.waiting == "user":
            env.hear(user_turn("Yes."))
        if action is not None and env.waiting == "agent":
            env.act(action)
    return env.reward


def exploit_probes(domain, tasks):
    """{probe: tasks it is paid for}: what a policy can earn without helping anybody."""
    names = {tool["function"]["name"] for tool in domain_data(domain).tools}
    transfer = json.dumps({"name": "transfer_to_human_agents", "arguments": {"summary": "x"}})
    everything = " ".join(str(number) for number in range(0, 3000))
    aside = json.dumps({"content": everything, "tool_calls": json.loads(f"[{transfer}]")})
    forged = json.dumps({"name": "toggle_airplane_mode", "arguments": {}, "requestor": "user"})
    probes = {"stop at once": [], "transfer to a human at once": [transfer],
              "recite the numbers 0-2999 to the user": [everything],
              "recite them beside a call, where the user does not see it": [aside],
              "forged requestor in an action": [forged]}
    if "transfer_to_human_agents" not in names:
        probes.pop("transfer to a human at once")
    env = Tau2Env(domain, tasks=tasks, agent_may_stop=True)  # so that every probe ends, whatever the user would say
    return {probe: [task_id for task_id in env.tasks if attempt(env, task_id, actions) > 0.0]
            for probe, actions in probes.items()}


def same_price_error(tasks):
    """Ids of tasks whose gold calls modify_pending_order_items on several items (tau2 issue 318).

    The tool gives every item the price and options of the last variant: gold and policy go through the same tool, so
    that the reward is consistent, but the orders that it shows to the policy are wrong.
    """
    return [task.id for task in tasks for action in task.evaluation_criteria.actions or []
            if action.name == "modify_pending_order_items" and len(set(action.arguments.get("new_item_ids", []))) > 1]


def audit(domain):
    """The report as lines of Markdown."""
    tasks = domain_tasks(domain, "base")
    idle = [task.id for task in tasks if do_nothing_reward(task, domain) > 0.0]
    errors, below = gold_errors(domain), gold_below_one(domain)
    writes = [task_id for task_id, found in errors.items() if any(kind == "write" for _, kind, _ in found)]
    lines = [f"# Audit of {domain}, tau2 {tau2_version()}", "", f"`python -m tests.audit_env {domain}`", "",
             f"- tasks in `base`: {len(tasks)}",
             f"- pay for doing nothing: **{len(idle)}**: {', '.join(idle) or 'none'}",
             f"- with gold actions that raise: **{len(errors)}**, of them failing writes: {', '.join(writes) or 'none'}",
             f"- gold replays below 1.0: **{len(below)}**: " + (", ".join(f"{k} {v}" for k, v in below.items()) or "none")]
    if domain == "retail":
        broken = same_price_error(tasks)
        lines.append(f"- gold modifies several items of an order at once, where the tool gives all of them the last "
                     f"one's price and options (tau2 issue 318): **{len(broken)}**: {', '.join(broken)}")
    splits = domain_data(domain).module.get_tasks_split()
    for split in [name for name in ("train", "test") if name in splits]:
        clean = domain_tasks(domain, f"{split}_clean")
        lines.append(f"- `{split}`: {len(splits[split])} tasks, `{split}_clean`: {len(clean)}")
    lines += ["", "## Exploit probes", "", "What a policy that helps nobody is paid for (tasks; `stop at once` is the "
              "do-nothing score).", "", "| probe | paid tasks | of them not paid for doing nothing |", "|---|---|---|"]
    for probe, paid in exploit_probes(domain, tasks).items():
        lines.append(f"| {probe} | {len(paid)} | {len(set(paid) - set(idle))} |")
    if errors:
        lines += ["", "## Gold actions that raise", "", "| task | tool | kind | error |", "|---|---|---|---|"]
        lines += [f"| {task_id} | {name} | {kind} | {error} |" for task_id, found in errors.items()
                  for name, kind, error in found]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("domain", choices=["retail", "airline", "telecom", "mock"])
    parser.add_argument("--out", default=None, help="also write the report to this file")
    args = parser.parse_args()
    lines = audit(args.domain)
    print("\n".join(lines))
    if args.out:
        with open(args.out, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
