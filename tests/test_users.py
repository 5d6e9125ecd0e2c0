"""users.py: the scripted customer on tau2's own tasks, and what a model, a server or a file must not be able to spoil."""
import copy
import http.server
import json
import threading
import time
from functools import lru_cache

import pytest
import torch
from tau2.data_model.tasks import StructuredUserInstructions, UserScenario

from env_tau2 import Conversation, Tau2Env, domain_tasks
from rollout import Row, generate_turns
from tests.campaign_users import audit, conditions, measure, wrong_plans
from user_scripted import ScriptedUser, first_person, parse_rule
from users import LLMUser, PolicyUser, ReplayUser, UserTurn

GREETING = "Hi! How can I help you today?"


def scenario(reason, known="You are Yusuf Rossi in zip code 19122.", unknown="You do not remember your email address.",
             instructions="You are polite.", domain="retail"):
    return UserScenario(persona=None, instructions=StructuredUserInstructions(
        domain=domain, reason_for_call=reason, known_info=known, unknown_info=unknown, task_instructions=instructions))


def conversation(scene, messages=(), seed=0, user_tools=(), key="retail/1/0"):
    return Conversation(key, "retail", "1", seed, scene, list(user_tools),
                        [{"role": "assistant", "content": GREETING}, *messages])


def answers(scene, *lines, seed=0, user=None):
    """The customer's turn after the greeting and after each line of the agent; stops at its own stop."""
    messages, out = [], []
    for line in (None, *lines):
        messages += [{"role": "assistant", "content": line}] if line else []
        out.append((user or ScriptedUser()).reply([conversation(scene, messages, seed)])[0].text)
        messages.append({"role": "user", "content": out[-1]})
        if "###" in out[-1]:
            break
    return out


CANCEL = scenario("You want to cancel order #W2378156 because you no longer need it. You also want to return the mug in "
                  "order #W1111111.", instructions="If the agent asks for a payment method, use your gift card.")


# ------------------------------------------------------------------ ScriptedUser: one conversation
def test_conversation_word_for_word():
    """The small policy learns on these very turns: a changed word is a changed task."""
    lines = ("Hello! May I have your email, or your full name and zip code?",
             "Do you want me to cancel order #W2378156 (reason: no longer needed)? (yes/no)", "Done. Anything else?",
             "Which payment method?", "Which order number?", "Do you want me to return the mug? (yes/no)",
             "Done. Anything else?")
    assert answers(CANCEL, *lines) == [
        "Hi! I want to cancel order #W2378156 because I no longer need it.", "I am Yusuf Rossi, zip code 19122.",
        "Yes, go ahead.", "I also want to return the mug in order #W1111111.", "Please use my gift card.",
        "The order number is #W1111111.", "Yes, please.", "No, that is all. Thanks! ###STOP###"]
    assert answers(CANCEL, *lines, seed=1)[:2] == [
        "Hello. I want to cancel order #W2378156 because I no longer need it.", "Yusuf Rossi, 19122."]


def test_all_in_one_go_and_plain_text():
    """A scenario that wants everything at once must not be told piece by piece; plain-text scenarios must not crash."""
    both = scenario("You want to cancel order #W2378156. You also want to return the mug.",
                    instructions="You want everything addressed in one go.")
    assert "I want to cancel order #W2378156. I also want to return the mug." in answers(both)[0]
    plain = UserScenario(persona=None, instructions="You want to create a task called 'Important Meeting' for user_1.")
    assert "I want to create a task called 'Important Meeting' for user_1." in answers(plain)[0]


def test_first_turn_holds_only_the_reason():
    """A customer that opens with its identity leaves the agent nothing to ask for."""
    for seed in range(5):
        opening = answers(CANCEL, seed=seed)[0]
        assert "#W2378156" in opening
        assert not any(x in opening for x in ("Rossi", "19122", "mug", "gift card"))


def test_does_not_know_and_does_not_invent():
    """An invented e-mail or order number sends the agent to another customer's data."""
    said = answers(scenario("You want to return the mug."), "What is your email?", "What is the order number?",
                   "What is your date of birth?", "What is your user id?", "Which color?", "Where do you live?")
    assert said[1] == "I do not remember my email address."
    assert said[2] == "I do not know the order number."
    assert all("know" in text for text in said[3:])


@pytest.mark.parametrize("plan, reply", [
    ("Do you want me to cancel order #W9999999? (yes/no)", "No, I mean order #W2378156."),
    ("Shall I return order #W2378156 (yes/no)?", "No. I want to cancel order #W2378156"),
    ("Shall I cancel order #W2378156, reason ordered by mistake (yes/no)?", "No. Because I no longer need it."),
    ("Shall I return the mug of order #W1111111 to your PayPal account (yes/no)?", "No. Please use my gift card."),
    ("Shall I cancel order #W2378156, reason no longer needed (yes/no)?", "Yes"),
])
def test_not_a_yes_man(plan, reply):
    """A customer that says yes to anything lets a wrong order, action, reason or payment through."""
    assert answers(CANCEL, plan)[1].startswith(reply)


def test_ends_after_nonsense_and_after_a_transfer():
    """Without an end of its own patience a customer keeps a babbling agent going to the step limit."""
    said = answers(CANCEL, "bla", "foo", "bla bar", "qux", "quux")
    assert said[-1].endswith("###STOP###") and len(said) <= 5
    assert answers(CANCEL, "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON.")[1] == "###TRANSFER###"
    assert answers(CANCEL, "I can transfer you to a human agent. Would you like me to transfer you?")[1] != "###TRANSFER###"


def test_a_customer_waits_for_an_agent_at_work():
    """"Let me look that up" is not the end of the conversation."""
    said = answers(CANCEL, "Let me look that up for you.", "The order has been found. One moment, please.")
    assert not any("###" in text for text in said)


def test_refusal_brings_the_condition_about():
    """"If blue is not available, you want red" must come out when blue is refused, and not before."""
    scene = scenario("You want to exchange the shirt for a blue one. If blue is not available, you want red. If multiple "
                     "sizes are available, you prefer XL.")
    said = answers(scene, "I could not find that zip code.", "I cannot give a discount on shipping at this time of year.",
                   "Sorry, blue is not available.", "There are multiple sizes. Which do you prefer?")
    assert "red" not in said[0] + said[1] + said[2] and "19122" in said[1]
    assert said[3] == "I want red." and said[4] == "I prefer XL."


@pytest.mark.parametrize("question, reply", [
    ("I need to verify you. Could you please provide either:\n1. Your email, or\n2. Your full name and zip code?", "Emma Kim"),
    ("What cabin class would you like?", "I am fine with economy."),
    ("How would you like to pay?", "I want to pay with my certificate."),
    ("What is the other passenger's name and date of birth?", "I want to add Kevin Smith, DOB 2001-04-12."),
    ("Do you need travel insurance?", "I do not need insurance."),
    ("I cannot offer a refund. Would you still like to cancel without a refund?", "No. I don't want to cancel if"),
    ("Would you like me to cancel it with a full refund?", "Yes"),
    ("Which payment method would you like, and do you confirm the changes (yes/no)?", "Yes"),
])
def test_questions_as_language_models_put_them(question, reply):
    """Lists, courtesies and open questions: a customer that understands only one phrasing trains agents to use it."""
    scene = scenario("You want to cancel reservation EHGLP3.", "You are Emma Kim in zip code 10001. Your user id is "
                     "emma_kim_9957.", None, "You are fine with economy. You want to pay with your certificate. You want to "
                     "add Kevin Smith, DOB 2001-04-12. You do not need insurance. You don't want to cancel if you don't get a "
                     "refund.", domain="airline")
    assert reply in answers(scene, question)[1]


def test_replay_record_of_a_killed_run_goes_on(tmp_path):
    """Half a line at the end must not swallow the next turn, nor stop the run that goes on with the file."""
    path = tmp_path / "turns.jsonl"
    ReplayUser(path, record=ScriptedUser()).reply([conversation(CANCEL)])
    path.write_text(path.read_text() + '{"key": "ab')
    ReplayUser(path, record=ScriptedUser()).reply([conversation(CANCEL, seed=1)])
    assert ReplayUser(path).reply([conversation(CANCEL, seed=1)]) == ScriptedUser().reply([conversation(CANCEL, seed=1)])
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("told, said", [
    ("You are Raj and you want your bag.", "I am Raj and I want my bag."),
    ("The agent told you that your order is late.", "You told me that my order is late."),
    ("You'd like it for yourself, if the agent can help you.", "I'd like it for myself, if you can help me."),
    ("You name is Lei Li.", "My name is Lei Li."),
    ("Your address is in your profile (you do not want to reveal it).", "My address is in my profile."),
    ("Ask the agent how much money you can save.", "Please tell me how much money I can save."),
])
def test_first_person(told, said):
    """A customer that says "You want your bag" talks about the agent."""
    assert first_person(told) == said


@pytest.mark.parametrize("sentence, kind, text", [
    ("If the agent asks for confirmation, only exchange the desk lamp.", "confirm", "Please only exchange the desk lamp."),
    ("If asked for reason, say you ordered the items by mistake.", "asked", "I ordered the items by mistake."),
    ("If 8 bar is not possible, you want 9 bar.", "denied", "I want 9 bar."),
    ("If that doesn't work, respond exactly with 'I forgot the W at the beginning'.", "denied",
     "I forgot the W at the beginning."),
    ("If multiple colors are available, you prefer black.", "note", "I prefer black."),
])
def test_rules(sentence, kind, text):
    """Stage directions ("say that ...") must not be read out."""
    rule = parse_rule(sentence)
    assert (rule.kind, rule.text) == (kind, text)


def test_pure_function_of_seed_scenario_and_messages():
    """Hidden state would make an episode depend on the batch it ran in."""
    tasks = domain_tasks("retail", "base")[:30]
    chats = [conversation(t.user_scenario, [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": line}], seed)
             for t in tasks for seed, line in ((0, "What is your email?"), (3, "Shall I go ahead? (yes/no)"))]
    before = copy.deepcopy(chats)
    together = ScriptedUser().reply(chats)
    assert [ScriptedUser().reply([c])[0] for c in reversed(chats)][::-1] == together
    assert chats == before


def test_never_reads_gold_actions():
    """A customer that peeks at evaluation criteria would steer the agent to the reward."""
    def turns(task):
        env, said = Tau2Env("retail", tasks=[task], user=ScriptedUser()), []
        observation, _ = env.reset(seed=0, options={"task_id": task.id})
        for line in ("May I have your email, or your full name and zip code?", "What do you need?", "Which payment method?",
                     "Shall I go ahead? (yes/no)", "Sorry, that is not possible.", "Anything else?"):
            said.append(observation)
            observation, _, terminated, truncated, _ = env.step(line)
            if terminated or truncated:
                break
        return said
    for task in domain_tasks("retail", "base")[::6]:
        criteria = task.evaluation_criteria.model_copy(update={"actions": [], "communicate_info": [], "nl_assertions": None})
        bare = task.model_copy(update={"evaluation_criteria": criteria, "description": None})
        assert turns(task) == turns(bare)


# ------------------------------------------------------------------ ScriptedUser: tau2's own tasks
@pytest.mark.parametrize("domain", ["retail", "airline", "telecom"])
def test_gold_agent_is_paid_and_the_customer_ends_it(domain):
    """A customer that stops too early, or never, costs the best agent its reward."""
    found = measure(domain, verbose=False)
    assert found["gold replay pays 1"] >= 0.9 * found["tasks"]
    assert len(found["gold plans refused twice"]) <= 0.02 * found["times asked to confirm"], "it stands in the way"
    assert found["own stop and full reward"] >= 0.95 * found["gold replay pays 1"], found["failures"]


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_facts_are_given_when_asked_for_and_only_then(domain):
    """Facts withheld make tasks impossible; facts volunteered make them trivial; invented ones make them wrong."""
    found = audit(domain)
    assert found["given"] >= 0.95 * found["facts asked for"], found["missing"]
    assert found["leaks"] == [] and found["invented"] == []
    assert found["facts asked for"] > 100


@pytest.mark.parametrize("domain, least", [("retail", 0.9), ("airline", 0.85)])
def test_conditional_wishes(domain, least):
    """The share that docs/users.md names must not fall unnoticed."""
    found = conditions(domain)
    assert found["handled"] >= least * found["conditional sentences"], found["not handled"]


def test_wrong_orders_are_refused():
    """A customer that accepts another order than the one it named hides the agent's mistake until the reward."""
    refused, asked = wrong_plans()["wrong orders refused"].split(" of ")
    assert int(refused) >= 11 and int(asked) == 16  # docs/users.md lists the five others


# ------------------------------------------------------------------ ScriptedUser: the customer's device
def telecom(index=0):
    task = domain_tasks("telecom", "base")[index]
    env = Tau2Env("telecom", tasks=[task], user=ScriptedUser())
    env.reset(seed=0, options={"task_id": task.id})
    return env


def own_calls(env, line):
    """The agent says a line; returns what the customer did on its device and what it then said."""
    start = len(env.transcript)
    env.step(line)
    new = env.transcript[start:]
    return [c for m in new if m["role"] == "user" for c in m.get("tool_calls") or []], new[-1]["content"]


def test_device_actions_in_the_words_of_their_description():
    """Dual control is not real if the customer does something else than it was asked for."""
    tools = [t["function"] for t in telecom().shared.user_tools]
    right = 0
    for tool in tools:
        wanted = {name: {"mode": "4g_5g_preferred", "app_name": "messaging", "permission": "sms"}.get(name)
                  for name in tool["parameters"].get("required", [])}
        words = " ".join(f"{name.replace('_', ' ')}: '{value}'." for name, value in wanted.items())
        calls, _ = own_calls(telecom(), f"Please do this on your phone: {tool['description'].split('. ')[0].strip()}. {words}")
        right += calls[:1] == [{"name": tool["name"], "arguments": wanted}]
    assert right >= 0.95 * len(tools)


PLAIN_WORDS = """check_status_bar|What does your status bar show?
check_network_mode_preference|What is your current network mode preference?
set_network_mode_preference|Please change the preferred network type to 4G/5G.
run_speed_test|Could you run a speed test and tell me the result?
check_network_status|Is airplane mode on?
check_sim_status|Could you check the status of your SIM card?
reseat_sim_card|Please remove your SIM card and re-insert it.
check_data_restriction_status|Is data saver mode on? Please check.
check_apn_settings|Please check your APN settings.
reset_apn_settings|Please reset your APN settings to default.
check_wifi_calling_status|Is Wi-Fi calling enabled?
check_vpn_status|Are you connected to a VPN?
disconnect_vpn|Please turn off the VPN.
check_installed_apps|Which apps are installed on your phone?
check_app_permissions|What permissions does the messaging app have?
grant_app_permission|Please grant the messaging app the sms permission.
can_send_mms|Can you send an MMS now?
reboot_device|Please restart your phone.
make_payment|I have sent you a payment request. Please pay the bill."""


def test_device_actions_in_plain_words():
    """Agents do not talk like tool descriptions."""
    lines = [line.split("|") for line in PLAIN_WORDS.splitlines()]
    done = [own_calls(telecom(), text)[0][:1] for _, text in lines]
    wrong = [(line, got) for line, got in zip(lines, done) if not got or got[0]["name"] != line[0]]
    assert len(wrong) <= 0.05 * len(lines), wrong


def test_device_results_are_read_and_reported():
    """A made-up reading would send the agent down the wrong path."""
    env = telecom()
    calls, said = own_calls(env, "Please check your status bar.")
    result = [m["content"] for m in env.transcript if m.get("requestor") == "user"][-1]
    assert calls == [{"name": "check_status_bar", "arguments": {}}] and result.split("\n")[0] in said


def test_switch_ends_where_the_agent_wants_it():
    """"Turn it off" must not turn on what was off: the tool only toggles."""
    env = telecom()
    own_calls(env, "Please turn on airplane mode.")
    calls, said = own_calls(env, "Please turn on airplane mode.")
    assert len(calls) == 2 and "Airplane Mode is now ON" in said


def test_impossible_request_and_agents_own_actions():
    """No tool fits, or the agent speaks of its own work: the customer says so and presses nothing."""
    env = telecom()
    calls, said = own_calls(env, "Please replace the battery.")
    assert calls == [] and "do not know how" in said
    calls, said = own_calls(env, "Shall I add 2 GB of data to your line? (yes/no)")
    assert calls == [] and said.startswith("Yes")
    calls, said = own_calls(env, "What is your phone number?")
    assert calls == [] and "555-123-2002" in said


def test_fixed_is_looked_up_not_believed():
    """A customer that takes the agent's word ends calls with the phone still broken."""
    env = telecom()
    calls, said = own_calls(env, "Your issue is resolved. Is there anything else?")
    assert calls and "still does not work" in said and env.waiting == "agent"


# ------------------------------------------------------------------ LLMUser
KEY = "gw-0123456789secret"


class FakeServer(http.server.BaseHTTPRequestHandler):
    """An endpoint on 127.0.0.1; `script` holds what each request gets: a status, a body or a pause in seconds."""
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append((self.headers["Authorization"], body))
            step = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        if step.get("pause"):
            time.sleep(step["pause"])
        message = {"role": "assistant", "content": step.get("text", "Hello there."), "tool_calls": step.get("tool_calls")}
        good = {"id": "1", "object": "chat.completion", "created": 1, "model": "m",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        data = (step["raw"] if "raw" in step else json.dumps(good)).encode()
        try:
            self.send_response(step.get("status", 200))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client gave up
            pass

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    """Start a server with a script; returns its LLMUser and the requests it saw."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    servers = []

    def start(*script, **kw):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
        server.daemon_threads, server.request_queue_size = True, 128
        server.script, server.seen, server.lock = list(script), [], threading.Lock()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        settings = {"timeout_s": 2.0, "retries": 2, "pause_s": 0.05} | kw
        return LLMUser("m", f"http://127.0.0.1:{server.server_port}/v1", **settings), server.seen
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_llm_answers_with_taus_guidelines_and_swapped_roles(endpoint):
    """The model must play the customer: tau2's own prompt, and the agent's words as the other side's."""
    from tau2.user.user_simulator import UserSimulator
    user, seen = endpoint({"text": " I want to cancel. "})
    assert user.reply([conversation(CANCEL)]) == [UserTurn("I want to cancel.")]
    sent = seen[0][1]["messages"]
    assert sent[0] == {"role": "system", "content": UserSimulator(instructions=str(CANCEL), llm="x").system_prompt}
    assert sent[1] == {"role": "user", "content": GREETING}
    assert seen[0][0] == f"Bearer {KEY}" and user.name == "llm:m"


def test_llm_uses_the_device(endpoint):
    """Tool calls and their results must reach the server as pairs, or it refuses the conversation."""
    call = {"id": "a", "type": "function", "function": {"name": "check_status_bar", "arguments": "{}"}}
    user, seen = endpoint({"text": None, "tool_calls": [call]}, {"text": "No signal."})
    env = telecom()
    env.user = user
    calls, said = own_calls(env, "What does the status bar show?")
    assert calls == [{"name": "check_status_bar", "arguments": {}}] and said == "No signal."
    sent = seen[1][1]["messages"]
    ids = [c["id"] for m in sent for c in m.get("tool_calls", [])]
    assert ids == [m["tool_call_id"] for m in sent if m["role"] == "tool"] and len(ids) == 1
    assert [t["function"]["name"] for t in seen[1][1]["tools"]] == [t["function"]["name"] for t in env.shared.user_tools]


@pytest.mark.parametrize("bad", [
    {"status": 429, "raw": "{}"}, {"status": 500, "raw": "oops"}, {"raw": "{broken"}, {"raw": "[]"}, {"text": ""},
    {"text": None}, {"raw": '{"choices": []}'},
    {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "fly", "arguments": "{}"}}]},
    {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "check_status_bar", "arguments": "{bad"}}]},
])
def test_llm_tries_again_and_then_gives_up(endpoint, bad):
    """A hiccup must not cost an episode, and a broken server must not be asked forever."""
    user, seen = endpoint(bad, {"text": "fine"})
    assert user.reply([conversation(CANCEL)])[0].text == "fine" and len(seen) == 2
    user, seen = endpoint(bad)
    turn = user.reply([conversation(CANCEL)])[0]
    assert turn.fault and not turn.text and len(seen) == 3 and "attempt 3 of 3" in turn.fault


def test_llm_pauses_double(endpoint):
    """Retries without a pause make an overloaded server worse."""
    user, _ = endpoint({"status": 500, "raw": "x"}, pause_s=0.2, retries=2)
    start = time.monotonic()
    user.reply([conversation(CANCEL)])
    assert 0.6 <= time.monotonic() - start < 15


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_llm_does_not_repeat_what_cannot_work(endpoint, status):
    """A wrong key or model name is found out at once; the key is in no message, even when the server echoes it."""
    user, seen = endpoint({"status": status, "raw": json.dumps({"error": {"message": f"wrong key {KEY} or sk-test***"}})})
    turn = user.reply([conversation(CANCEL)])[0]
    assert len(seen) == 1 and str(status) in turn.fault
    assert KEY not in turn.fault and "sk-test" not in turn.fault and KEY not in repr(user)


def test_llm_that_hangs_costs_bounded_time(endpoint):
    """One silent server must not stop a training run; the fault is an outcome, never a reward."""
    user, _ = endpoint({"pause": 30}, timeout_s=0.4, retries=1, pause_s=0.05)
    start = time.monotonic()
    env = Tau2Env("retail", split="test", user=user)
    _, info = env.reset(seed=0)
    assert time.monotonic() - start < 20  # the server would take 30 s a request
    _, reward, terminated, truncated, info = env.result()
    assert info["outcome"] == "user_error" and reward == 0.0 and info.get("reward_info") is None and truncated


def test_llm_deadline_of_a_turn(endpoint):
    """Retries times time-out can add up to hours; the deadline is for the whole turn."""
    user, _ = endpoint({"pause": 9}, timeout_s=20, deadline_s=0.5)
    start = time.monotonic()
    turns = user.reply([conversation(CANCEL)] * 3)
    assert time.monotonic() - start < 6 and all("0.5 s" in t.fault for t in turns)


def test_llm_conversations_wait_together(endpoint):
    """32 conversations at 0.5 s each, one after another, are 16 s a round."""
    user, seen = endpoint({"pause": 0.5})
    user.reply([conversation(CANCEL)])
    took = []
    while len(took) < 4 and min(took, default=9.0) >= 3:  # again on a machine that is busy with other things
        start = time.monotonic()
        turns = user.reply([conversation(CANCEL, seed=i) for i in range(32)])
        took.append(time.monotonic() - start)
        assert all(t.text == "Hello there." for t in turns)
    assert min(took) < 3 and len(seen) == 1 + 32 * len(took)


def test_llm_one_fault_leaves_the_others_alone(endpoint):
    """A batch is as many conversations, not one."""
    user, _ = endpoint({"text": "a"}, {"text": ""}, {"text": "b"}, retries=0)
    turns = user.reply([conversation(CANCEL, seed=i) for i in range(3)])
    assert sorted(bool(t.fault) for t in turns) == [False, False, True]


def test_llm_without_key_or_server_is_refused(monkeypatch):
    """Found out at the start, not in the first rollout; a local server needs no key."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        LLMUser("m")
    LLMUser("m", "http://127.0.0.1:9/v1")


# ------------------------------------------------------------------ PolicyUser
class ByteChat:
    """A chat template over bytes: 1 ends a turn, 2 opens the agent's (here: user) and 3 the customer's (assistant) turn.

    Sampled bytes are shown as characters from 256 on, so that text turns back into the very tokens.
    """
    family, stop_ids, pad_id = "bytes", [1], 0
    marks = {"system": 4, "user": 2, "assistant": 3, "tool": 5}

    def prompt_ids(self, policy, tools, messages):
        shown = [{"role": "system", "content": policy[-40:]}, *messages]
        return [t for m in shown for t in self._one(m)] + [3]

    def _one(self, m):
        return [self.marks[m["role"]], *(ord(c) % 256 % 128 for c in m["content"]), 1]

    def suffix_ids(self, turn_ids, new_messages):
        return ([] if turn_ids[-1] == 1 else [1]) + [t for m in new_messages for t in self._one(m)] + [3]

    def parse(self, turn_ids):
        return "".join(chr(256 + t) for t in turn_ids if t != 1)


@lru_cache(maxsize=1)
def small_llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=2048)
    return LlamaForCausalLM(config).eval()


def with_adapter():
    """A LoRA model whose adapter does something; its base weights are those of small_llama."""
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(copy.deepcopy(small_llama()), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(std=2.0)
    return model


def talk_with(user, rounds=3, scenes=(CANCEL, scenario("You want to return the mug."))):
    """Several conversations in one batch; in each round but the first one of them is left out in turn."""
    chats = [conversation(s, seed=i, key=f"retail/{i}/{i}") for i, s in enumerate(scenes)]
    out = []
    for n in range(rounds):
        batch = [c for i, c in enumerate(chats) if n == 0 or i != n % 2]
        for c, turn in zip(batch, user.reply(batch)):
            out.append(turn.text)
            c.messages += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": f"Round {n}. And then?"}]
    return out


def policy_user(model, **kw):
    return PolicyUser(model, ByteChat(), generate_turns, Row, max_new_tokens=12, **kw)


def test_policy_user_is_the_frozen_base():
    """A customer that learns with the policy makes the task easier as training goes on."""
    model = with_adapter()
    said = talk_with(policy_user(model))
    assert said == talk_with(policy_user(copy.deepcopy(small_llama()), frozen=True))
    merged = copy.deepcopy(model).merge_and_unload()  # the control: the same adapter, and nothing can switch it off
    assert said != talk_with(policy_user(merged, frozen=True))
    assert any("lora_" in n and p.requires_grad for n, p in model.named_parameters())


def test_policy_user_holds_no_second_copy():
    """Twice the weights is what running the customer on the same card must not cost."""
    model = with_adapter()
    before = {p.data_ptr() for p in model.parameters()}
    user = policy_user(model)
    user.reply([conversation(CANCEL)])
    tensors = {id(t) for t in user.__dict__.values() if isinstance(t, torch.Tensor)}
    assert {p.data_ptr() for p in user.model.parameters()} == before and not tensors
    assert user.model is model


def test_policy_user_keeps_its_cache_and_the_cache_is_exact():
    """Encoding the whole conversation anew each turn is quadratic; a wrong cache changes what is said."""
    def run(forgets):
        model, tokens = with_adapter(), []
        model.get_input_embeddings().register_forward_hook(lambda layer, ids, out: tokens.append(ids[0].numel()))
        user = policy_user(model)
        reply = user.reply

        def forget(chats):
            user.rows, user.cache = {}, None
            return reply(chats)
        user.reply = forget if forgets else reply
        return talk_with(user, rounds=5), sum(tokens)
    said, few = run(forgets=False)
    anew, many = run(forgets=True)
    assert said == anew and few < 0.6 * many, (few, many)


def test_policy_user_siblings_with_equal_words_keep_their_own_rows():
    """Siblings share seed and key: one row for two conversations would mix them up."""
    user = policy_user(with_adapter())
    twins = [conversation(CANCEL), conversation(CANCEL)]
    for c, turn, line in zip(twins, user.reply(twins), ("Your email?", "Your zip code?")):
        c.messages += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": line}]
    together = [t.text for t in user.reply(twins)]
    alone = []
    for c in twins:
        alone.append(policy_user(with_adapter()).reply([c])[0].text)
    assert together == alone


def test_policy_user_refusals_and_full_context():
    """Full weights change while they train; the small policy reads no rules; a full context is a fault, not a crash."""
    with pytest.raises(ValueError, match="frozen copy"):
        policy_user(small_llama())
    chat = ByteChat()
    chat.family = "tiny"
    with pytest.raises(ValueError, match="small policy"):
        PolicyUser(with_adapter(), chat, generate_turns, Row)
    turns = policy_user(with_adapter(), max_context=20).reply([conversation(CANCEL)])
    assert "context is full" in turns[0].fault


# ------------------------------------------------------------------ ReplayUser
def episode(user, task):
    """One episode with a fixed agent; returns everything that was said and done."""
    env = Tau2Env(task.user_scenario.instructions.domain, tasks=[task], user=user)
    env.reset(seed=5, options={"task_id": task.id})
    for line in ("May I have your email, or your full name and zip code?", "Please check your status bar.",
                 "Shall I go ahead? (yes/no)", "Done. Anything else?"):
        if env.waiting == "agent":
            env.step(line)
    return env.transcript, env.outcome


@pytest.mark.parametrize("domain", ["retail", "telecom"])
def test_replay_gives_what_was_recorded(domain, tmp_path):
    """A replay that differs cannot reproduce a result, and one that needs the model cannot run without it."""
    task, path = domain_tasks(domain, "base")[3], tmp_path / "turns.jsonl"
    recorder = ReplayUser(path, record=ScriptedUser())
    recorded = episode(recorder, task)
    assert recorder.name == "scripted" and ReplayUser(path).name == "replay"
    assert episode(ReplayUser(path), task) == recorded == episode(ScriptedUser(), task)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows and all(r["where"].startswith(f"{domain}/{task.id}/5") for r in rows)


def test_replay_asks_no_question_twice(tmp_path):
    """A customer that answers differently each time: siblings and resumed runs must hear what the file holds."""
    class Moody:
        name, count = "moody", 0

        def reply(self, conversations):
            self.count += len(conversations)
            return [UserTurn(f"turn {self.count} {i}") for i, _ in enumerate(conversations)]
    path = tmp_path / "turns.jsonl"
    moody = Moody()
    first = ReplayUser(path, record=moody).reply([conversation(CANCEL)] * 3 + [conversation(CANCEL, seed=1)])
    assert moody.count == 2 and first[0] == first[1] == first[2] != first[3]
    again = ReplayUser(path, record=moody).reply([conversation(CANCEL)])
    assert moody.count == 2 and again == first[:1]


def test_replay_that_leaves_the_record_says_where(tmp_path):
    """"Not found" without a place cannot be acted on; a made-up turn would be worse."""
    path = tmp_path / "turns.jsonl"
    ReplayUser(path, record=ScriptedUser()).reply([conversation(CANCEL)])
    off = conversation(CANCEL, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Something new"}])
    turns = ReplayUser(path).reply([conversation(CANCEL), off])
    assert turns[0].fault is None
    assert all(part in turns[1].fault for part in (str(path), "retail/1/0", "message 3", "Something new"))
    env = Tau2Env("retail", split="test", user=ReplayUser(path))
    env.reset(seed=0)
    assert env.outcome == "user_error"


def test_replay_file_errors(tmp_path):
    """A truncated or foreign file is named with its line; faults are never recorded as turns."""
    with pytest.raises(ValueError, match="no recorded"):
        ReplayUser(tmp_path / "none.jsonl")
    path = tmp_path / "bad.jsonl"
    path.write_text('{"key": "a", "turn": {"text": "hi"}}\n{"key": ')
    with pytest.raises(ValueError, match="line 2"):
        ReplayUser(path)

    class Broken:
        name = "broken"

        def reply(self, conversations):
            return [UserTurn(fault="no") for _ in conversations]
    path = tmp_path / "new folder" / "empty.jsonl"
    assert ReplayUser(path, record=Broken()).reply([conversation(CANCEL)])[0].fault == "no"
    assert path.read_text() == ""


def test_recording_never_empties_somebody_elses_file(tmp_path):
    """A mistyped --user-record on a file without a final newline used to be cut to nothing."""
    path = tmp_path / "precious.json"
    for text in ('{"my": "precious file"}', 'notes\nmore notes', '{"a": 1}\n{"b"'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a recorded turn"):
            ReplayUser(path, record=ScriptedUser())
        assert path.read_text() == text
