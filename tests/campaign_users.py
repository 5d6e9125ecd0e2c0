"""Measure the scripted customer against tau2's own tasks: `python -m tests.campaign_users retail`.

A gold agent knows a task's gold actions and talks like an ordinary one (who are you, what do you need, shall I go
ahead, anything else); it carries the actions out whatever the customer answers, and what the customer answered is
counted apart. Kept results: docs/users.md.
"""
import collections
import json
import re
import sys

from env_tau2 import Conversation, Tau2Env, domain_tasks
from user_scripted import ScriptedUser, content_words, split_sentences
from users import UserTurn

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
    env = Tau2Env(domain, tasks=[task], max_steps=400, max_errors=100, agent_may_stop=True)
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
                else:
                    log["refused"].append(f"{plan_words(action)}: {answer}")
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
    failures, refused, plans, device, done = [], [], 0, 0, 0
    for task in paying:
        log = collections.defaultdict(list)
        reward, outcome, transcript, _ = play(domain, task, ScriptedUser(), gold_agent(task, domain, user_tools, log))
        last = transcript[-1]
        refused += [(task.id, text) for text in log["refused"]]
        plans += len(log["confirm"])
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
            "times asked to confirm": plans, "gold plans refused twice": refused, "failures": failures}


# ------------------------------------------------------------------ what the customer gives, and what it keeps back
GREETING = "Hi! How can I help you today?"
KINDS = {  # kind -> (how to find its values in a scenario, how to ask)
    "order": (r"#?W\d{7}\b|\b950212\d\b", "What is the order number?"),
    "reservation": (r"\b(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])[A-Z0-9]{6}\b", "What is the reservation id?"),
    "e-mail": (r"[\w.]+@[\w.]+\.com", "What is your email?"),
    "user id": (r"\b[a-z]+_[a-z]+_\d{4}\b", "What is your user id?"),
    "zip": (r"(?<![\w#$])\d{5}\b(?! ?(?:dollar|mile))", "What is your zip code?"),
    "name": (r"(?:You are|[Yy]ou name is|[Yy]our name is|You're|called) ((?!Gold|French)[A-Z][a-z]+(?: [A-Z][a-z]+)?)",
             "What is your full name?"),
    "address": (r"\d+ \w+ (?:Drive|Highway|St|Street|Avenue)\b|Suite \d+", "What is the address?"),
    "item": (None, "Which item or flight is it about?"),
}


def scenario_text(task) -> str:
    ins = task.user_scenario.instructions
    return "\n".join(filter(None, (ins.known_info, ins.unknown_info, ins.reason_for_call, ins.task_instructions)))


def values_of(task, kind, products) -> set[str]:
    """What a scenario holds of one kind; items are the shop's product names in the reason for calling, or airports."""
    pattern, text = KINDS[kind][0], scenario_text(task)
    if pattern:
        return set(re.findall(pattern, text))
    reason = re.sub(r"\([^()]*do not reveal[^()]*\)", "", task.user_scenario.instructions.reason_for_call)
    return {p for p in products if re.search(rf"\b{p}s?\b", reason, re.I)} if products else set(re.findall(r"\b[A-Z]{3}\b", reason))


def talk(domain, task, lines, seed=0):
    """The customer's turns when the agent says these lines, whatever it answers; ends early with the customer's stop."""
    messages, out = [{"role": "assistant", "content": GREETING}], []
    for line in [None, *lines]:
        messages += [{"role": "assistant", "content": line}] if line else []
        turn = ScriptedUser().reply([Conversation("k", domain, task.id, seed, task.user_scenario, [], messages)])[0]
        out.append(turn.text)
        messages.append({"role": "user", "content": turn.text})
        if "###" in turn.text:
            break
    return out


def audit(domain):
    """For every fact of every base scenario: given when asked for, kept back when not, and nothing that is not there."""
    products = set()
    if domain == "retail":
        names = {p.name for p in Tau2Env("retail").shared.world.tools.db.products.values()}
        products = {n.split()[-1].lower() for n in names}
    asked, given, kept, leaks, invented, missing = 0, 0, 0, [], [], []
    for task in domain_tasks(domain, "base"):
        reason, text = task.user_scenario.instructions.reason_for_call, scenario_text(task)
        silent = talk(domain, task, ["I am looking into it."])
        for kind, (_, question) in KINDS.items():
            values = values_of(task, kind, products)
            if not values:
                continue
            told = " ".join(talk(domain, task, [question, question, "Is there anything else?"] * 6 +
                                  [question, "Could you double check? I cannot find it."])).lower()
            for value in values:
                asked += 1
                given += value.lower() in told
                if value.lower() not in told:
                    missing.append((task.id, kind, value))
                if kind != "item":
                    kept += 1
                    if value in " ".join(silent) and value not in reason:
                        leaks.append((task.id, kind, value))
            for kind2, (pattern, _) in KINDS.items():
                if pattern and kind2 not in ("name", "address"):
                    invented += [(task.id, v) for v in re.findall(pattern, told) if v.lower() not in text.lower()]
    return {"domain": domain, "facts asked for": asked, "given": given, "share": round(given / asked, 3), "missing": missing,
            "kept back": kept - len(leaks), "leaks": leaks, "invented": invented}


def wrong_plans():
    """Retail tasks that name their orders: ask to confirm the same action on another order. Returns: (refused, asked)."""
    refused = asked = 0
    for task in domain_tasks("retail", "base"):
        if values_of(task, "order", ()):
            asked += 1
            reply = talk("retail", task, ["Do you want me to go on with order #W0000000? (yes/no)"])[1]
            refused += not reply.startswith("Yes")
    return {"wrong orders refused": f"{refused} of {asked}"}


def conditions(domain):
    """Play each "if X, then Y" sentence: bring X about, and see whether the customer says most of Y's words."""
    rows = []
    for task in domain_tasks(domain, "base"):
        for sentence in split_sentences(scenario_text(task)):
            head = r"(?:But |And |Also |However,? )?(if and only if|only if|only after|if|when) (.+?)"
            m = re.match(head + r", (?:then )?((?:you|say|mention|ask)\b.+)", sentence, re.I | re.S) or \
                re.match(head + r",? (?:then )?((?:(?<=, )|(?<=then )).+)", sentence, re.I | re.S) or \
                re.match(r"(if) (not), (.+)", sentence, re.I | re.S)
            if not m:
                continue
            cause = re.sub(r"\b(?:the )?(?:service )?agents? (finally )?(says|tells you|mentions|asks|insists)( you)?( that)?|^asked", "",
                           m[2], flags=re.I).strip() or m[3]
            cause = "that is not possible" if cause in ("not", "not possible") else cause
            asks = re.search(r"\bask", m[2]) and "confirm" not in m[2]
            lines = [f"Could you tell me {cause}?"] if asks else [f"I am sorry, but {cause}.", f"It turns out that {cause}. "
                                                                  "What do you prefer?"] * 3
            lines += ["Do you want me to go ahead? (yes/no)"] * 2
            told = content_words(" ".join(talk(domain, task, lines + ["Is there anything else?"] * 5)))
            want = content_words(m[3]) - content_words("say mention agent tell ask provide first angry become")
            rows.append((task.id, sentence[:100], len(want & told) >= 0.5 * max(1, len(want))))
    tasks = sorted({r[0] for r in rows}, key=int)
    return {"domain": domain, "conditional sentences": len(rows), "handled": sum(r[2] for r in rows),
            "tasks": {t: f"{sum(r[2] for r in rows if r[0] == t)} of {sum(r[0] == t for r in rows)}" for t in tasks},
            "not handled": [r[:2] for r in rows if not r[2]]}


if __name__ == "__main__" and "__file__" in globals():
    for name in sys.argv[1:]:
        results = [measure(name), *([wrong_plans()] if name == "retail" else [])] + ([audit(name), conditions(name)] if name in ("retail", "airline") else [])
        print(json.dumps(results, indent=1))
