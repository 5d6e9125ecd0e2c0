"""Nobody's reasoning reaches the other side: 24 forms of it, from every speaker, written out by hand.

Each case names what the other side must see. All reasoning holds a stop word, which must not count.
"""
import json
from types import SimpleNamespace

import pytest

from env_tau2 import Tau2Env, domain_tasks
from tests.test_chat import family_chat, ids_of
from tests.test_users import CANCEL, conversation, endpoint  # noqa: F401 (endpoint is a fixture)
from users import PolicyUser, ReplayUser, UserTurn, conversation_hash

THOUGHT = "They want ###STOP###. I stop soon."
CALL = '{"name": "get_order", "arguments": {"id": "#W1"}}'
AGENT_CASES = [  # (chat family, the sampled turn, the action)
    ("qwen3", f"<think>\n{THOUGHT}\n</think>\n\nWhich order?<|im_end|>", "Which order?"),
    ("qwen3", f"<think>\n{THOUGHT} Which order?<|im_end|>", ""),
    ("qwen3", f"{THOUGHT}\n</think>\n\nWhich order?<|im_end|>", "Which order?"),
    ("qwen3", f"<tool_call>{CALL}</tool_call> {THOUGHT}\n</think>\nWhich order?<|im_end|>", "Which order?"),
    ("qwen2_5", f"<think>{THOUGHT}</think>Which<think>{THOUGHT}</think> order?<|im_end|>", "Which order?"),
    ("qwen2_5", f"<thinking>{THOUGHT}</thinking><tool_call>\n{CALL}\n</tool_call><|im_end|>", CALL),
    ("smollm2", f"{THOUGHT}</think>Which order?<|im_end|>", "Which order?"),
    ("llama3_1", f"<think>{THOUGHT}</think>\nWhich order?<|eot_id|>", "Which order?"),
    ("llama3_1", f"{THOUGHT}</think>\n{CALL.replace('arguments', 'parameters')}<|eot_id|>", CALL),
    ("gptoss", f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>Which order?"
               "<|return|>", "Which order?"),
    ("gptoss", f"<|channel|>analysis<|message|>{THOUGHT}", ""),
    ("gptoss", f"<|channel|>final<|message|><think>{THOUGHT}</think>Which order?<|return|>", "Which order?"),
]
CUSTOMER_CASES = [  # (what the endpoint, the record or the policy's base wrote, what the agent sees; "": nothing)
    (f"<think>{THOUGHT}</think>I want my lamp.", "I want my lamp."),
    (f"<THINK>{THOUGHT}</THINK>\n\nI want my lamp. ###STOP###", "I want my lamp. ###STOP###"),
    (f"I want my lamp. <think>{THOUGHT}", "I want my lamp."),
    (f"<think>{THOUGHT}", ""),
    (f"{THOUGHT}</think>I want my lamp.", "I want my lamp."),
    (f"[THINK]{THOUGHT}[/THINK]I want my lamp.", "I want my lamp."),
    (f"<think>a <think>{THOUGHT}</think> b ###STOP###</think> I want my lamp.", "I want my lamp."),
    (f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>I want my lamp.",
     "I want my lamp."),
    (f"analysis{THOUGHT}assistantfinalI want my lamp.", "I want my lamp."),
    (f"<|channel|>analysis<|message|>{THOUGHT}<|end|>", ""),
    (f"<thinking>{THOUGHT}</thinking>", ""),
    (f"{THOUGHT}</think>", ""),
]


def test_there_are_24_cases():
    """Guards a table that shrinks unseen."""
    assert len(AGENT_CASES) + len(CUSTOMER_CASES) == 24


@pytest.mark.parametrize("name, sampled, action", AGENT_CASES)
def test_the_customer_never_sees_the_agents_reasoning(name, sampled, action):
    """Bug: the customer reads the agent's thinking, or a stop word in it ends the episode where an agent may stop."""
    chat = family_chat(name)
    said = chat.parse(ids_of(chat, sampled))
    assert json.loads(said) == json.loads(action) if action.startswith("{") else said == action
    env = Tau2Env("retail", split="base", tasks=domain_tasks("retail", "base")[:1], agent_may_stop=True)
    env.begin("0", 0)
    env.hear(UserTurn("Hello."))
    env.act(said)
    assert env.outcome is None and "STOP" not in json.dumps(env.transcript)
    if not action:  # nothing but thinking: an empty turn, which the policy is told and the customer is not
        assert env.waiting == "agent" and env.new_messages[0]["name"] == "error" and len(env.judged) == 2


@pytest.mark.parametrize("wrote, seen", CUSTOMER_CASES)
def test_the_agent_never_sees_the_customers_reasoning(endpoint, tmp_path, wrote, seen):  # noqa: F811
    """Bug: an endpoint without a reasoning parser; the stop word inside ends the episode with reward 0."""
    talk = conversation(CANCEL)
    user, requests = endpoint({"text": wrote})  # asked again where nothing was said, then a fault
    turn = user.reply([talk])[0]
    assert turn.text == seen and bool(turn.fault) == (not seen) and len(requests) == (1 if seen else 3)
    chat = SimpleNamespace(parse=family_chat("qwen2_5").parse)
    row = SimpleNamespace(sampled=ids_of(family_chat("qwen2_5"), wrote))
    if "<|channel|>" not in wrote:  # a ChatML policy does not write harmony; gpt-oss is among the agent's cases
        turn = PolicyUser._read(SimpleNamespace(chat=chat), talk, row)
        assert turn.text == seen and bool(turn.fault) == (not seen)
    record = tmp_path / "record.jsonl"
    record.write_text(json.dumps({"key": conversation_hash(talk, talk.messages), "where": "x",
                                  "turn": {"text": wrote, "tool_calls": [], "fault": None}}) + "\n")
    turn = ReplayUser(record).reply([talk])[0]
    assert turn.text == seen and bool(turn.fault) == (not seen)


def test_a_reasoning_parsers_field_is_not_speech(endpoint):  # noqa: F811
    """Bug: `reasoning_content` taken for the answer, or an answer that holds nothing else taken for a turn."""
    def answer(content):
        message = {"role": "assistant", "content": content, "reasoning_content": THOUGHT}
        return {"raw": json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [
            {"index": 0, "finish_reason": "stop", "message": message}]})}
    user, requests = endpoint(answer(None), answer("I want my lamp."))
    assert user.reply([conversation(CANCEL)]) == [UserTurn("I want my lamp.")] and len(requests) == 2
    user, _ = endpoint(answer(None))
    assert user.reply([conversation(CANCEL)])[0].fault


@pytest.mark.parametrize("said", ['{"status": "pending"} is what I see.', '{"name": "get_order", "arguments": {}}',
                                  "[1] Open the box.", "get_order(id='#W1')"])
def test_harmonys_final_message_is_speech(said):
    """Bug: what gpt-oss tells the customer runs as a call, or as a malformed one, since it starts with a brace."""
    chat = family_chat("gptoss")
    env = Tau2Env("retail", split="base", tasks=domain_tasks("retail", "base")[:1])
    env.tool_names = env.tool_names | {"get_order"}
    env.begin("0", 0)
    env.hear(UserTurn("Hello."))
    env.act(chat.parse(ids_of(chat, f"<|channel|>final<|message|>{said}<|return|>")))
    assert env.waiting == "user" and env.conversation.messages[-1]["content"] == said
