"""The synthetic retail tasks, the oracle's demonstrations, and the small policy's tokenizer and warm start."""
import hashlib
import inspect
import json
import math
import random
from pathlib import Path

import pytest
import torch

from chat import load_chat
from env_tau2 import Tau2Env, do_nothing_reward
from tiny.tasks_retail import (LEVEL_SHARES, make_tasks, naming_options, retail_data,
                               split_customers, task_level, verified)
from tiny.warm_start import (ASK_IDENTITY, CALL_PIECES, Demo, agent_log_probs, build_tokenizer, copy_batch,
                             copy_tokens, demonstrate, held_out, load_stage, make_optimizers, oracle_turns, policy_config,
                             save_stage, slipped, training_batch, warm_start, warm_step)
from user_scripted import ScriptedUser

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "tiny" / "policy"
# sha256 of the conversations of 50 tasks, one per line; the small policy was trained on exactly these words.
GOLDEN_TALKS = "3cd1a55e34eec1e43263136d4dbdd9b9151ce589861496d4a924208d20b5b6bc"


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def chat(tokenizer):
    return load_chat(tokenizer)


def act_out(task, chat, seed=0):
    """Run the oracle on one task in Tau2Env; (Demo, transcript)."""
    env = Tau2Env("retail", tasks=[task])
    demo = demonstrate(task, chat, env, ScriptedUser(), seed)  # raises unless the reward is 1.0
    return demo, list(env.transcript)


# ------------------------------------------------------------------ tasks

def test_same_arguments_same_tasks_and_other_seed_other_tasks():
    """A generator that draws from a global random state gives a different validation set on every run."""
    first, again, other = make_tasks(30, 5, "val"), make_tasks(30, 5, "val"), make_tasks(30, 6, "val")
    assert [t.model_dump() for t in first] == [t.model_dump() for t in again]
    assert [t.user_scenario for t in first] != [t.user_scenario for t in other]


def test_a_longer_list_starts_with_the_shorter_one():
    """Raising --n must not silently change the tasks that were reported before."""
    assert [t.id for t in make_tasks(40, 3, "train")][:15] == [t.id for t in make_tasks(15, 3, "train")]


def test_customers_are_disjoint_and_none_is_from_the_benchmark_test():
    """A customer in both splits (or in tau2's test tasks) lets memorised ids pass for learning."""
    train, val = set(split_customers("train")), set(split_customers("val"))
    assert not train & val and len(train) > 300 and len(val) > 60
    split_file = json.loads((Path(tau2_retail_folder()) / "split_tasks.json").read_text())
    for raw in json.loads((Path(tau2_retail_folder()) / "tasks.json").read_text()):
        text = json.dumps(raw)
        if raw["id"] in split_file["test"]:
            assert not [u for u in train | val if u in text], raw["id"]
            for order_id, order in retail_data()["orders"].items():
                assert order_id not in text or order["user_id"] not in train | val
    for split, own in (("train", train), ("val", val)):
        for task in make_tasks(60, 1, split):
            for action in task.evaluation_criteria.actions:
                order = retail_data()["orders"].get(action.arguments.get("order_id"))
                assert action.arguments.get("user_id", next(iter(own))) in own
                assert order is None or order["user_id"] in own


def tau2_retail_folder():
    from tau2.domains.retail.utils import RETAIL_TASK_SET_PATH
    return Path(RETAIL_TASK_SET_PATH).parent


def test_nothing_is_planted_in_what_ships(chat):
    """A start that is low because of a planted fault lets GRPO look good by unlearning it."""
    from model import load_policy
    assert inspect.signature(warm_start).parameters["careless"].default == 0.0
    tasks = make_tasks(24, 5, "val", levels=(1, 2))
    env = Tau2Env("retail", tasks=tasks)
    demos = [demonstrate(task, chat, env, ScriptedUser()) for task in tasks]
    assert held_out(load_policy("tiny", device="cpu").model, demos)["sampled"] > 0.6


def test_tau2_loads_the_task_file(tmp_path, monkeypatch):
    """The file must be tau2's own format, not something that only we can read."""
    import tau2.domains.retail.environment as retail
    path = tmp_path / "tasks.json"
    tasks = make_tasks(25, 0, "train")
    path.write_text(json.dumps([t.model_dump(mode="json") for t in tasks]))
    monkeypatch.setattr(retail, "RETAIL_TASK_SET_PATH", path)
    assert [t.model_dump() for t in retail.get_tasks(None)] == [t.model_dump() for t in tasks]


@pytest.mark.parametrize("level", sorted(LEVEL_SHARES))
def test_gold_pays_one_and_nothing_pays_zero_in_the_environment(level, chat):
    """A task whose gold fails, or which rewards silence, teaches nothing or the wrong thing."""
    tasks = make_tasks(12, 21, "val", levels=(level,))
    for task in tasks:
        assert task_level(task.id) == level
        act_out(task, chat)
        assert do_nothing_reward(task) == 0.0


@pytest.mark.slow
def test_gold_pays_one_on_500_tasks(chat):
    """The promise at scale, over all levels and both splits; demonstrate raises where the reward is not 1."""
    for split in ("train", "val"):
        tasks = make_tasks(250, 99, split)
        env = Tau2Env("retail", tasks=tasks)
        for task in tasks:
            demonstrate(task, chat, env, ScriptedUser())
            assert do_nothing_reward(task) == 0.0


def test_reward_is_that_of_tau2s_own_evaluator():
    """Gold replayed by hand and judged by tau2 itself, without our environment; then with the write left out."""
    from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
    from tau2.data_model.simulation import SimulationRun, TerminationReason
    from tau2.domains.retail.environment import get_environment
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    def judge(task, actions, say):
        env, messages = get_environment(), [AssistantMessage(role="assistant", content="Hi!"),
                                            UserMessage(role="user", content="Hello")]
        for i, action in enumerate(actions):
            call = ToolCall(id=str(i), name=action.name, arguments=action.arguments)
            messages.append(AssistantMessage(role="assistant", content=None, tool_calls=[call]))
            messages.append(env.get_response(call))
        messages += [AssistantMessage(role="assistant", content=say), UserMessage(role="user", content="###STOP###")]
        run = SimulationRun(id="x", task_id=task.id, start_time="", end_time="", duration=0.0, messages=messages,
                            termination_reason=TerminationReason.USER_STOP)
        return evaluate_simulation(run, task, EvaluationType.ALL, False, "retail").reward

    for task in make_tasks(1, 8, "val", levels=(2,)) + make_tasks(1, 9, "val", levels=(4,)):
        gold, facts = task.evaluation_criteria.actions, task.evaluation_criteria.communicate_info
        assert judge(task, gold, " ".join(facts)) == 1.0
        assert judge(task, gold[:-1], "Done.") == 0.0


def test_facts_are_long_and_not_in_the_scenario():
    """tau2 looks for the fact as a substring of what the agent says: a short one, or one in the prompt, is luck."""
    tasks = [t for t in make_tasks(300, 4, "val") if t.evaluation_criteria.communicate_info]
    assert len(tasks) > 60
    for task in tasks:
        for fact in task.evaluation_criteria.communicate_info:
            assert len(fact) >= 4 and fact not in str(task.user_scenario)


def test_verified_refuses_broken_gold():
    """A check that passes everything is no check: wrong reason, and a task without any effect."""
    task = next(t for t in make_tasks(20, 0, "train", levels=(1,)) if "cancel" in t.id)
    order = retail_data()["orders"][task.evaluation_criteria.actions[-1].arguments["order_id"]]
    assert verified(task, order["user_id"])
    broken = task.model_copy(deep=True)
    broken.evaluation_criteria.actions[-1].arguments["reason"] = "bored"
    assert not verified(broken, order["user_id"])
    idle = task.model_copy(deep=True)
    idle.evaluation_criteria.actions.pop()
    assert not verified(idle, order["user_id"])


def test_options_named_for_an_exchange_single_out_one_variant():
    """Worked by hand: 'color red' fits two variants, so the size must be named too; a twin can not be named."""
    red_s, red_m = {"options": {"color": "red", "size": "S"}}, {"options": {"color": "red", "size": "M"}}
    blue_s = {"options": {"color": "blue", "size": "S"}}
    assert naming_options(blue_s, [red_s, red_m, blue_s]) == ("color",)
    assert naming_options(red_m, [red_s, red_m, blue_s]) == ("size",)
    assert naming_options(red_s, [red_s, red_m, blue_s]) == ("color", "size")
    assert naming_options(red_s, [red_s, dict(red_s)]) is None


def test_bad_names_are_refused():
    """An unknown split or level must not quietly become another one."""
    with pytest.raises(ValueError, match="'dev'"):
        make_tasks(1, 0, "dev")
    with pytest.raises(ValueError, match="level 9"):
        make_tasks(1, 0, "val", levels=(9,))


def test_a_thousand_tasks_take_under_a_minute():
    """Verification must not rebuild the database for each task (0.6 s each: ten minutes)."""
    import time
    start = time.perf_counter()
    make_tasks(200, 31, "train")
    assert time.perf_counter() - start < 12  # a fifth of a minute


# ------------------------------------------------------------------ nobody's shortcut

def test_user_and_prompt_never_hold_the_gold_call(chat):
    """If the customer (or the prompt) speaks tool names, item ids or payment ids, learning is reading out."""
    for task in make_tasks(40, 12, "val", levels=(1, 2, 3, 4, 5)):
        demo, transcript = act_out(task, chat)
        heard = " ".join(m["content"] for m in transcript if m["role"] == "user")
        prompt = chat.tokenizer.decode(demo.ids[:demo.agent.index(1)])
        for action in task.evaluation_criteria.actions:
            hidden = [action.name] + [i for k in ("item_ids", "new_item_ids") for i in action.arguments.get(k, [])]
            ids = ("payment_method_id", "user_id", "product_id")
            hidden += [action.arguments[k] for k in ids if k in action.arguments]
            assert not [h for h in hidden if h in heard or h in prompt], (task.id, hidden)


def test_constant_policies_score_zero_from_level_two():
    """A policy that ignores the conversation must not be paid: no constant turn solves a task of level 2 or more."""
    constants = ["Done. Is there anything else?", "I am sorry, I can not do that. Is there anything else?",
                 '{"name": "list_all_product_types", "arguments": {}}', ASK_IDENTITY,
                 '{"name": "get_order_details", "arguments": {"order_id": "#W1234567"}}']
    user = ScriptedUser()
    tasks = make_tasks(12, 40, "val", levels=(2, 3, 4, 5))
    env = Tau2Env("retail", tasks=tasks, max_steps=30)
    for task in tasks:
        for constant in constants:
            env.begin(task.id, 0)
            while env.waiting is not None:
                env.hear(user.reply([env.conversation])[0]) if env.waiting == "user" else env.act(constant)
            assert env.result()[1] == 0.0, (task.id, constant)


def test_golden_transcripts(chat):
    """The shipped policy was trained on ScriptedUser's words on such tasks: a change makes it worse unseen."""
    digest = hashlib.sha256()
    for task in make_tasks(50, 2026, "val", levels=(1, 2, 3, 4, 5)):
        for message in act_out(task, chat)[1]:
            digest.update(f"{message['role']}: {message.get('content') or ''}\n".encode())
    assert digest.hexdigest() == GOLDEN_TALKS


# ------------------------------------------------------------------ tokenizer and template

def test_numbers_names_and_ids_keep_their_tokens_from_sentence_to_call(tokenizer):
    """If " Elm" in a sentence and "Elm" in a call are different tokens, the policy can not copy what it heard."""
    said = tokenizer.encode("I want order #W5386730 sent to 505 Elm Street, Suite 648, San Jose, CA 95163 instead.")
    call = json.dumps({"name": "modify_pending_order_address", "arguments": {
        "order_id": "#W5386730", "address1": "505 Elm Street", "address2": "Suite 648", "city": "San Jose",
        "state": "CA", "country": "USA", "zip": "95163"}})
    written = tokenizer.encode(call)
    assert tokenizer.decode(written) == call
    pieces = {tokenizer.convert_tokens_to_ids(piece) for piece in CALL_PIECES if piece != "#W"}
    copied = [t for t in written if t not in pieces]
    assert len(written) < 30 and not set(copied) - set(said)


def test_calls_start_with_one_token_each_and_digits_come_in_pairs(tokenizer):
    """A BPE that merges whole order numbers makes each of them a new word that nobody can copy."""
    for piece in CALL_PIECES:
        assert len(tokenizer.encode(piece)) == 1, piece
    assert [tokenizer.decode([t]) for t in tokenizer.encode("6469567")] == ["64", "69", "56", "7"]


def test_demonstration_is_the_template_of_its_transcript(chat):
    """Append-only pieces must add up to the template's rendering of the whole conversation, or rollout drifts."""
    for task in make_tasks(8, 2, "val", levels=(1, 3, 4, 5)):
        demo, transcript = act_out(task, chat)
        text = chat.tokenizer.decode(demo.ids)
        talk = [{"role": "system", "content": "rules"}] + transcript
        whole = chat.tokenizer.apply_chat_template(talk, tokenize=False)
        assert whole.startswith(text)
        assert chat.tokenizer.encode(text, add_special_tokens=False) == demo.ids
        spoken = [t for t, own in zip(demo.ids, demo.agent) if own]
        assert chat.tokenizer.decode(spoken).split("<|end|>")[:-1] == oracle_turns(task)


def test_tool_results_survive_as_short_lines(chat):
    """The template's digest must keep what a task needs: ids, prices, tracking, payments, balances, stock."""
    data = retail_data()
    order = next(o for o in data["orders"].values() if o["fulfillments"])
    user = next(u for u in data["users"].values() if any("gift" in p for p in u["payment_methods"]))
    product = next(p for p in data["products"].values() if not all(v["available"] for v in p["variants"].values()))

    def shown(record, name):
        ids = chat.suffix_ids(chat.stop_ids[:1], [{"role": "tool", "name": name, "content": json.dumps(record)}])
        return chat.tokenizer.decode(ids)

    line = shown(order, "get_order_details")
    needed = [order["order_id"], order["user_id"], order["status"], order["fulfillments"][0]["tracking_id"][0]]
    needed += [f"{p['transaction_type']} {p['amount']} {p['payment_method_id']}" for p in order["payment_history"]]
    needed += [f"{i['name']} item {i['item_id']} price {i['price']} product {i['product_id']}" for i in order["items"]]
    assert all(part in line for part in needed), line
    line = shown(user, "get_user_details")
    assert all(p in line for p in [*user["payment_methods"], *user["orders"]]) and "balance" in line
    line = shown(product, "get_product_details")
    assert line.count(" item ") == len(product["variants"]) and " out" in line
    assert shown(order, "cancel_pending_order") == "<|tool|>ok<|end|><|assistant|>"
    assert "Error: Order not found" in shown("", "x").replace("\"\"", "Error: Order not found")
    odd = chat.suffix_ids(chat.stop_ids[:1], [{"role": "tool", "name": "error", "content": '{"user_id": 3, "x": [}'}])
    assert chat.tokenizer.decode(odd).endswith("<|end|><|assistant|>")


def test_slips_are_shown_but_not_trained(chat):
    """A demonstrated mistake that is trained on teaches mistakes; one that changes the database breaks the task."""
    tasks = make_tasks(30, 13, "train")
    env = Tau2Env("retail", tasks=tasks)
    seen = 0
    for task in tasks:
        plain = demonstrate(task, chat, env, ScriptedUser())
        demo = demonstrate(task, chat, env, ScriptedUser(), slip_share=0.5)  # raises unless the reward is 1.0
        seen += len(demo.ids) > len(plain.ids)
        for one in (plain, demo):
            spoken = chat.tokenizer.decode([t for t, own in zip(one.ids, one.agent) if own])
            assert spoken.split("<|end|>")[:-1] == oracle_turns(task)
    assert seen > 15
    assert slipped("Shall I cancel order #W1234567?", random.Random(0)) == "Shall I cancel order #W1234567?"


def test_careless_clerks_are_paid_nothing(chat):
    """The planted fault of --careless must be one that tau2's reward sees and the customer does not: no write, no fact."""
    tasks = [t for t in make_tasks(60, 13, "train") if "refused" not in t.id]
    env = Tau2Env("retail", tasks=tasks)
    for task in tasks:
        demo = demonstrate(task, chat, env, ScriptedUser(), careless=1.0)
        assert env.result()[1] == 0.0 and env.outcome == "fail", task.id
        assert len(demo.ids) <= len(demonstrate(task, chat, env, ScriptedUser()).ids) + 12
    rng = random.Random(0)
    lazy = [oracle_turns(task, rng, 0.6) != oracle_turns(task) for task in tasks * 5]
    assert 0.5 < sum(lazy) / len(lazy) < 0.85  # 0.6 of the single wishes, more of the pairs


@pytest.mark.slow
def test_tokenizer_is_rebuilt_the_same(tokenizer):
    """`python -m tiny.warm_start` must be able to rebuild what ships: same vocabulary, same template."""
    again = build_tokenizer()
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template


# ------------------------------------------------------------------ warm start

def small_model(tokenizer):
    from attention import use_sink_attention
    from transformers import GptOssForCausalLM
    torch.manual_seed(0)
    return use_sink_attention(GptOssForCausalLM(policy_config(tokenizer)))


def test_every_repeated_token_can_be_copied(tokenizer):
    """A curriculum that asks for tokens which copying can not give trains noise."""
    for demo in copy_batch(random.Random(0), copy_tokens(tokenizer), 20, 160):
        assert len(demo.ids) == len(demo.agent) == 160 and sum(demo.agent) > 40
        for at, own in enumerate(demo.agent):
            pairs = [(demo.ids[i - 1], demo.ids[i]) for i in range(1, at)]
            assert not own or (demo.ids[at - 1], demo.ids[at]) in pairs


def test_packed_log_probs_equal_eager_attention_alone(tokenizer, chat):
    """Packed conversations must not see each other, and must count positions from their own start."""
    model = small_model(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    demos = [act_out(task, chat)[0] for task in make_tasks(3, 1, "val", levels=(1, 2, 3))]
    with torch.no_grad():
        packed, _ = agent_log_probs(model, demos)
        model.set_attn_implementation("eager")
        alone = []
        for demo in demos:
            ids = torch.tensor([demo.ids])
            logp = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            alone.append(logp[torch.tensor(demo.agent[1:], dtype=torch.bool)])
    assert torch.allclose(packed, torch.cat(alone), atol=1e-4)


def test_training_resumes_where_it_stopped(tokenizer, tmp_path):
    """Optimizer state that is lost (or loaded into the wrong parameter) makes a resumed run another run."""
    tokens = copy_tokens(tokenizer)
    fake = [Demo("d", d.ids, d.agent) for d in copy_batch(random.Random(1), tokens, 20, 60)]

    def steps(model, optimizers, first, last):
        batches = [training_batch(step, 0, True, fake, tokens) for step in range(first, last)]
        return [warm_step(model, optimizers, batch, 1.0)[0] for batch in batches]

    straight = small_model(tokenizer)
    optimizers = make_optimizers(straight)
    losses = steps(straight, optimizers, 0, 2)
    save_stage(tmp_path / "s", straight, tokenizer, optimizers, 2, True)
    losses += steps(straight, optimizers, 2, 4)
    resumed = small_model(tokenizer)
    fresh = make_optimizers(resumed)
    assert load_stage(tmp_path / "s", resumed, fresh) == (2, True)
    again = steps(resumed, fresh, 2, 4)
    assert losses[2:] == pytest.approx(again, abs=1e-5) and losses[0] > losses[-1]
    for a, b in zip(straight.parameters(), resumed.parameters()):
        assert torch.allclose(a, b, atol=1e-5)


def test_muon_and_adamw_share_out_every_parameter_once(tokenizer):
    """A parameter in neither optimizer never learns; one in both learns twice."""
    model = small_model(tokenizer)
    held = [p for o in make_optimizers(model) for g in o.param_groups for p in g["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


# ------------------------------------------------------------------ what ships

def test_policy_folder_is_small_and_ordinary(tokenizer):
    """It must stay within 12 MB and load like any checkpoint, with the right end and pad tokens."""
    from model import load_policy
    size = sum(p.stat().st_size for p in POLICY.rglob("*") if p.is_file())
    assert size <= 12 * 2**20
    policy = load_policy("tiny", device="cpu")
    count = sum(p.numel() for p in policy.model.parameters())
    assert 1e6 <= count <= 4e6 and policy.model.config.model_type == "gpt_oss"
    assert load_chat(policy.tokenizer).family == "tiny"
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token == "<|pad|>"


def test_policy_knows_the_conversation(chat):
    """Untrained or damaged weights would pass every test above: the shipped ones know most of the oracle's words."""
    from model import load_policy
    model = load_policy("tiny", device="cpu").model
    demos = [act_out(task, chat)[0] for task in make_tasks(16, 77, "val", levels=(1, 2))]
    with torch.no_grad():
        log_probs, hits = agent_log_probs(model, demos)
    assert hits.float().mean() > 0.85 and math.exp(-log_probs.mean()) < 3  # an untrained one: 0.00 and 1,400
