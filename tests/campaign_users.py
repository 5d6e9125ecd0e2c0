"""Measure the scripted customer against tau2's own tasks: `python -m tests.campaign_users retail`.

A gold agent knows a task's gold actions and talks like an ordinary one (who are you, what do you need, shall I go
ahead, anything else); it carries the actions out whatever the customer answers, and what the customer answered is
counted apart. Kept results: docs/users.md.
"""
import collections
import json
import re
import sys

from env_tau2 import Tau2Env, domain_tasks
from users import ScriptedUser, UserTurn, script_of

WRITE_WORDS = re.compile(r"cancel|return|exchange|modify|update|book|send_cert|enable|disable|refuel|resume|suspend|"
                         r"payment|change")


class GoldUser:
    """Runs the gold's own user actions, says yes to everything else and stops when told to: the replay without a customer."""
    name = "gold"

    def reply(self, conversations):
        turns = []
        for c in conversations:
            last = next(m["content"] for m in reversed(c.messages) if m["role"] == "assistant")
            if c.messages[-1]["role"] == "tool":
                turns.append(UserTurn("done"))
            elif last.startswith("RUN "):
                turns.append(UserTurn(tool_calls=[json.loads(last[4:])]))
            else:
                turns.append(UserTurn("yes ###STOP###" if last.endswith("Goodbye.") else "yes"))
        return turns


def call_of(action) -> dict:
    return {"name": action.name, "arguments": action.arguments}


def play(domain, task, user, agent, seed=0):
    """Run one conversation; `agent(text)` is a generator of actions that is sent the customer's last text."""
    env = Tau2Env(domain, tasks=[task], max_steps=400, max_errors=100)
    env.begin(task.id, seed=seed)
    moves, last = None, ""
    while env.waiting:
        if env.waiting == "user":
            turn = user.reply([env.conversation])[0]
            env.hear(turn)
            last = turn.text
        elif moves is None:
            moves = agent()
            env.act(next(moves))
        else:
            env.act(moves.send(last))
    observation, reward, terminated, truncated, info = env.result()
    return reward, env.outcome, env.transcript, env.conversation


def replay_agent(task):
    """Gold actions only."""
    def moves():
        yield "Hello."
        for action in task.evaluation_criteria.actions or []:
            if action.requestor == "user":
                yield "RUN " + json.dumps(call_of(action))
            else:
                yield json.dumps(call_of(action))
        yield "So: " + ", ".join(task.evaluation_criteria.communicate_info or []) + ". Goodbye."
    return moves


def plan_words(action) -> str:
    """A gold action as an agent would put it: "cancel the pending order (order_id: #W1, reason: no longer needed)"."""
    verb = action.name.replace("_", " ")
    verb = re.sub(r"^(return|exchange) delivered order items", r"\1 the items", verb)
    shown = ", ".join(f"{k}: {v}" for k, v in action.arguments.items() if not isinstance(v, (dict, list)) or k.endswith("ids"))
    return f"{verb} ({shown})"


def gold_agent(task, domain, user_tools, log):
    """Gold actions behind ordinary questions; `log` collects how the customer answered each kind of question."""
    who = {"retail": "May I have your email, or your full name and zip code?", "airline": "May I have your user id?",
           "telecom": "May I have your phone number?", "mock": "Who are you?"}[domain]
    about = {t["function"]["name"]: t["function"]["description"].strip().split(". ")[0] for t in user_tools}

    def moves():
        log["who"].append((yield who))
        for action in task.evaluation_criteria.actions or []:
            if action.requestor == "user":
                details = " ".join(f"{k.replace('_', ' ')}: '{v}'." for k, v in action.arguments.items())
                log["device"].append((action.name, action.arguments,
                                      (yield f"Please do this on your phone: {about[action.name].rstrip('.')}. {details}")))
                continue
            if action.name == "transfer_to_human_agents":
                yield json.dumps(call_of(action))
                log["transfer"].append((yield "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON."))
                continue
            if WRITE_WORDS.search(action.name):
                for _ in range(2):
                    answer = yield f"Do you want me to {plan_words(action)}? (yes/no)"
                    log["confirm"].append(answer)
                    if answer.lower().startswith("yes"):
                        break
            yield json.dumps(call_of(action))
        facts = ", ".join(task.evaluation_criteria.communicate_info or [])
        for _ in range(15):
            log["else"].append((yield (f"For your information: {facts}. " if facts else "") +
                                "Is there anything else I can help you with?"))
        yield "###STOP###"  # the customer would not end it: counted as a failure
    return moves


def measure(domain, split="base", verbose=True):
    """Returns: counts and the list of failures, {"tasks", "paying", "stopped_full", "failures": [(id, reason)]}."""
    tasks = domain_tasks(domain, split)
    paying = [t for t in tasks if play(domain, t, GoldUser(), replay_agent(t))[0] == 1.0]
    user_tools = Tau2Env(domain, tasks=tasks[:1]).shared.user_tools
    failures, device, done = [], 0, 0
    for task in paying:
        log = collections.defaultdict(list)
        reward, outcome, transcript, _ = play(domain, task, ScriptedUser(), gold_agent(task, domain, user_tools, log))
        last = transcript[-1]
        own_stop = last["role"] == "user" and "###" in last["content"]
        calls = [c for m in transcript if m["role"] == "user" for c in m.get("tool_calls") or []]
        for name, arguments, _ in log["device"]:
            device += 1
            done += {"name": name, "arguments": arguments} in calls
        if reward < 1.0 or not own_stop:
            failures.append((task.id, f"reward {reward}, outcome {outcome}, last: {last['role']}: {last['content'][:90]!r}"))
            if verbose:
                print(task.id, failures[-1][1])
                for m in transcript[-8:]:
                    print("      ", m["role"], str(m.get("tool_calls") or m["content"])[:200])
    return {"domain": domain, "tasks": len(tasks), "gold replay pays 1": len(paying),
            "own stop and full reward": len(paying) - len(failures), "device actions": f"{done} of {device}",
            "failures": failures}


if __name__ == "__main__" and "__file__" in globals():
    for name in sys.argv[1:]:
        print(json.dumps(measure(name), indent=1))
