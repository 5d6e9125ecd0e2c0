"""The other speaker: four customers that talk to the policy, none of which can spoil a run.

`reply(conversations) -> turns` is batched, so that many episodes wait once. A turn is text (with one of tau2's stop
words when the customer is done), calls of the customer's own tools, or a fault, which the environment turns into the
outcome `user_error` and never into a reward. `conversation` is env_tau2.Conversation: all that a customer may know.

`ScriptedUser` (the default) keeps no state: a turn is a function of seed, scenario and messages. It reads the scenario
sentence by sentence, turns "You want ..." into "I want ...", and answers from those sentences; gold actions and
evaluation criteria never reach it. What it can and cannot do, with measured shares: docs/users.md.
"""
import hashlib
import json
import os
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, TimeoutError as LateError
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

USER_STOP, USER_TRANSFER = "###STOP###", "###TRANSFER###"  # tau2/user/base.py


@dataclass
class UserTurn:
    """What the customer does: says something, uses its own tools, or (fault) cannot go on for reasons of the world."""
    text: str = ""
    tool_calls: list[dict] = field(default_factory=list)  # [{"name", "arguments"}]
    fault: str | None = None


@dataclass(frozen=True)
class ScenarioRule:
    """A sentence "if X, then Y" of a scenario."""
    kind: str     # the agent asks to "confirm", has "asked" about X, "denied" X; anything else is a "note"
    trigger: str  # X, as written
    text: str     # Y, in the first person


@dataclass(frozen=True)
class ScenarioScript:
    """A scenario as the customer uses it; all texts in the first person."""
    wishes: tuple[str, ...]        # told one after another, or (one_go) all at once
    notes: tuple[str, ...]         # told when asked about
    rules: tuple[ScenarioRule, ...]
    facts: dict[str, list[str]]    # topic -> values, those of known_info first
    unknown: tuple[str, ...]       # "I do not remember my email address."
    one_go: bool
    insists: bool                  # does not take the first no for an answer


# Topic -> (how the agent asks about it, which sentences of a scenario answer it, how the customer words a known value).
USER_TOPICS = {
    "email": (r"e-?mail", r"e-?mail|@", "My email is {}."),
    "zip": (r"\bzip|postal", r"\bzip", "My zip code is {}."),
    "name": (r"\bname\b(?! of)", r"\bname is\b", "My name is {}."),
    "user id": (r"user ?id|username|user name|account id|customer id", r"user id", "My user id is {}."),
    "order": (r"order (numbers?|ids?|#)|(which|what)( \w+)? orders?\b", r"\border\b", "The order number is {}."),
    "reservation": (r"(reservation|confirmation|booking) (ids?|numbers?|codes?|reference)|which reservation",
                    r"reservation|confirmation number", "The reservation is {}."),
    "phone": (r"phone number|mobile number|line number", r"phone number", "My phone number is {}."),
    "address": (r"(?<!mail )(?<!mail)\baddress|\bstreet\b|where do you live",
                r"\baddress\b|\blive\b|living|residing|\b(suite|street|drive|avenue|highway|st)\b", ""),
    "birthday": (r"date of birth|birthday|\bdob\b", r"birth|\bdob\b", ""),
    "payment": (r"payment|\bpay\b|paying|refund(ed)? (method|to)|which card|credit card|gift card|paypal",
                r"\bpay\b|payment|gift ?card|\bgc\b|paypal|credit card|visa|master ?card|amex|certificate|card ending", ""),
    "reason": (r"\breason\b|\bwhy\b", r"because|\breason\b|by mistake|no longer need|\bsince\b|due to", ""),
    "budget": (r"budget|how much .*(willing|spend)", r"\$\d", ""),
}
NOT_GIVEN = {"payment": "I have no preference.", "reason": "I have no special reason.", "zip": "I do not know my zip code.",
             "order": "I do not know the order number.", "reservation": "I do not know the reservation number.",
             "budget": "I have no limit in mind."}
VALUE_PATTERNS = {
    "email": r"[\w.+-]+@[\w-]+\.\w+", "user id": r"\b[a-z]+_[a-z]+_\d+\b", "order": r"#W\d{7}\b|\bW\d{7}\b",
    "reservation": r"\b(?=[A-Z0-9]*[A-Z])[A-Z0-9]{6}\b", "phone": r"\b\d{3}-\d{3}-\d{4}\b"}
# What the agent's message does; each is searched in lower-case text.
AGENT_SAYS = {
    "denied": r"\bcannot|can't|\bcan not|unable|not (be )?(possible|available|allowed|eligible|permitted)|not able|n't ("
              r"possible|available|allowed|eligible|work|allow)|no longer available|does not allow|basic economy|\bdenied|"
              r"refuse|there (is|are) no\b|could not|couldn't|not found|not work",
    "transfer": r"being transferred|transferring you|(have|been) transferred|will (now )?transfer you|i'll transfer you",
    "confirm": r"yes/no|yes or no|\byes\b|do you (want|wish) me to|would you like me to|would you like to (proceed|continue|"
               r"go ahead)|shall (i|we)|should i|(can|may) i (go ahead|proceed)|do you (confirm|agree|approve)|please confirm|"
               r"you confirm|(ok|okay|fine|ready) to (proceed|go)|is (that|this|it|everything) (all )?(correct|right|ok|okay|"
               r"fine)|proceed\?|go ahead\?",
    "ask": r"\b(what|which|who|whom|where|when|how|why)\b|(may|can|could|might) i (please )?(have|get|ask|know)|provide|"
           r"\bshare\b|\btell me\b|give me|\bneed (your|the|to know)|let me know|(verify|confirm) your|specify|describe|"
           r"is there|are there|do you (know|have|remember)|did you|are you",
    "more": r"(any|some)thing else|what else|else (can|may|could) i|further (assist|help|request)|other (request|questions)|"
            r"anything more|additional (help|assist)",
    "open": r"how (can|may|could) i (help|assist)|what (can|may) i do|what do you need|what would you like|what do you want|"
            r"how can i be of|what brings you|(help|assist) you (with )?today|what (is|are) your (request|issue|problem)",
    "busy": r"\b(let me|one moment|next,|now i|i will now|i'll now|moving on|please wait|please hold)\b",
    "done": r"\bdone\b|(has|have) (now )?been|complete|success|processed|\bis now\b|\bare now\b|updated|all set|confirmed|"
            r"cancell?ed\b|changed|resolved",
}
SMALL_WORDS = frozenset("""a an the of to for from in on at by with and or but not no yes do does did is are was were be
been have has had i me my mine you your yours it its this that these those them they there here what which who whom
whose when where why how may can could would should shall will please provide tell know need want like wish help any
some all also just as if so agent item items order orders product products one ones get got give let me am us we our
about into out up ask asks asked possible available work more most than then much many long exactly sure specific today
now would prefer different new okay able want's make made think thing things kind type""".split())


# ------------------------------------------------------------------ ScriptedUser: reading the scenario
def split_sentences(text: str) -> list[str]:
    """Cut scenario or agent text into sentences; list lines ("- add 3 bags") stay with the sentence before them."""
    text = re.sub(r",\s*\n\s*", ", ", re.sub(r"\s*\n\s*[-*]\s+", " - ", text or ""))
    parts = re.split(r"(?<=[.!?;])(?<!\b[A-Z]\.)(?<!\bSt\.)(?<!\bDr\.)(?<!\be\.g\.)(?<!\.\.\.)[\"')]*\s+|\n+|\.\.\.\s+",
                     text)
    return [p for p in (p.strip().lstrip(".,; ") for p in parts) if re.search(r"\w\w", p)]


# Pattern -> replacement, in order. @I and @A hold "I" and the agent back from the rules below them.
PERSON_FLIPS = (
    (r"(?i)\s*\([^()]*\b(reveal|mention|hide|you know|do not|don't)\b[^()]*\)\.?", ""),  # what the actor must hide
    (r",? but do(n't| not) (reveal|mention)[^.]*", ""),
    (r"\b[Yy]ou name is\b", "your name is"), (r"\(your forgot", "(you forgot"),  # tau2's typos
    (r"\b(?:[Yy]ou )?(?:also )?(?:explicitly )?(?:[Aa]sk|want) (?:the )?agent (?:explicitly )?to\b", "please"),
    (r"\b(?:[Yy]ou )?(?:can )?(?:also )?[Aa]sk the agent(?: explicitly)? (?=how|wh|if|for|about)", "please tell me "),
    (r"please tell me for", "I would like"),
    (r"\b[Tt]he (?:service |customer service )?agents?\b", "@A"),
    (r"\b[Aa]re you\b", "am @I"), (r"\b[Yy]ou(?:'re| are)\b", "@I am"), (r"\b[Yy]ou were\b", "@I was"),
    (r"\b[Yy]ourself\b", "myself"), (r"\b[Yy]ours\b", "mine"), (r"\b[Yy]our\b", "my"),
    (r"\b(to|for|with|from|asks?|asked|tells?|told|gives?|give|helps?|lets?|allows?|charge|offers?|contact|gets?|sends?|of|"
     r"about|suits?|saves?|informs?|remind) [Yy]ou\b(?!')(?! (want|will|can|have|had|just|would|do|did|live|already|ordered|"
     r"received|bought|purchased|placed|need|like|prefer)\b)", r"\1 me"),
    (r"\b[Yy]ou\b", "@I"), (r"@I", "I"),
    (r"@A's", "your"), (r"@A is\b", "you are"), (r"@A has\b", "you have"), (r"@A (doesn't|does not)\b", "you don't"),
    (r"@A (ask|say|tell|find|offer|refuse|make|insist|provide|give|agree|mention|allow)e?s\b", r"you \1"),
    (r"@A", "you"), (r"\s+", " "),
)


def first_person(sentence: str) -> str:
    """Turn an instruction to the customer into what the customer says: "You want your bag" -> "I want my bag." """
    for pattern, replacement in PERSON_FLIPS:
        sentence = re.sub(pattern, replacement, sentence)
    s = sentence.strip(" ,;-")
    s = s[:1].upper() + s[1:]
    return s if s[-1:] in ".!?" else s + "."


def rule_consequence(text: str) -> str:
    """The part after "if ..., " as the customer says it: "say that it is X" -> "It is X.", "cancel it" -> "Please cancel it." """
    s = re.sub(r"^(then|and|but|you|simply|just|suddenly|abruptly|initially|please|will|can|are ok with|should|,|\s)+ ", "",
               text.strip(" ,"), flags=re.I)
    s = re.sub(r"^(are|become) angry( and swear[^,]*)?,?( but| and| then)? ", "", s)
    s = re.sub(r"^add another request and (also )?|^do not say yes immediately, because (you )?", "", s)
    s = re.sub(r" and provide (\d+)", r", it is \1", s)
    quote = re.search(r"(?:respond|say|answer)\b[^'\"]*['\"](.+?)['\"]\s*\.?$", s)
    if quote:
        return quote.group(1)
    s = re.sub(r"\s*\([^()]*\)", "", s)
    value = re.match(r"(?:say|provide|give)(?: that)?(?: it is| it's)? ([#\w]*\d\w*)( first| initially)?\b", s)
    if value:
        return f"It is {value.group(1)}."
    s = re.sub(r"^(?:say|says|mention|tell (?:the )?agent|respond|answer|insist)(?: explicitly)?(?: that)?( it's| it is)?\s+(?=\w)",
               lambda m: "it is " if m.group(1) else "", s)
    s = re.sub(r" (initially|first)(?=\.?$)", "", s)
    s = re.sub(r"^((?:also |only )?(?:want|prefer)|would|don't|do not|ask|need|like|wish|regret|wonder|accept|have|go|'d|allow|"
               r"decide|change (?:your|my) mind|are|feel|agree)\b", r"you \1", s)
    s = re.sub(r"^you (do not|don't) (?=exchange|cancel|return|make|process|do\b)", r"please \1 ", s)
    s = re.sub(r"^you ask (to be|to get) ", r"you want \1 ", s)
    s = re.sub(r"^you ask (to|for) (?=\w)", lambda m: "please " if m.group(1) == "to" else "you would like ", s)
    if re.match(r"(only |also |try to |try )?(exchange|cancel|return|change|use|keep|pick|go|choose|book|drop|move|upgrade|"
                r"refund|modify|switch|add|remove|transfer|proceed|take|make)\b", s):
        s = "please " + s
    return first_person(s)


def parse_rule(sentence: str) -> ScenarioRule | None:
    """Read "If/When X, Y" into a rule; None when the sentence is not conditional."""
    s = re.sub(r"^(But|And|Also|However),? ", "", sentence, flags=re.I)
    head = r"(?:if and only if|only if|only after|if|when|in case|once)\b\s*((?:[^(]|\([^)]*\))+?)"
    m = re.match(head + r",\s*(?:then\s+)?(?=you\b|you'|please|say|mention|ask)(.+)", s, re.I | re.S) \
        or re.match(head + r"(?:,\s*(?:then\s+)?|\s+then\s+)(.+)", s, re.I | re.S)
    if not m and not re.match(r"if not\b", s, flags=re.I):
        return None
    trigger, effect = m.groups() if m else ("not", s[6:])
    low = trigger.lower()
    if re.search(r"confirm", low):
        kind = "confirm"
    elif re.search(r"\bask(s|ed)?\b", low) and not re.search(r"cannot|can't|not ", low):
        kind = "asked"
    elif re.search(r"\bnot\b|n't|cannot|unable|\bno\b|fail|refuse|denie|issue|insist|basic|only option|says?\b|mention", low):
        kind = "denied"
    else:  # a condition on the world: it is said along with the wish, except where it only chooses among variants
        return ScenarioRule("note", trigger, rule_consequence(effect) if re.search(r"several|multiple", trigger)
                            else first_person(s))
    return ScenarioRule(kind, trigger, rule_consequence(effect))


WANT_WORDS = r"\b(want|wants|wish|like to|need|wonder|ask|request|inquire|check|try to|looking (for|to)|please|'d like)\b"
# How to play the part, not what to say.
STAGE_WORDS = (r"make sure (you|to)|do(n't| not) (reveal|mention|volunteer|end the|ask for comp|accept the)|^mention |"
               r"will not say anything|more information than|^be |^sound |make everything sound|at the same time|"
               r"ground your responses|^for example|tool call|^you like to (say|do|talk)|conversation as confusing|"
               r"randomly insert|speak (very )?brief|^you are (a|an|very|extremely|polite|in debt|reactive|not good|\w+, )|"
               r"end each of your|this is incorrect|^insist|take no for|tactics|in one go")
ONE_GO_WORDS = (r"in one go|same time|(all (two|three)|two|both) (things|requests|problems)|all requests|(details|everything) "
                r"upfront|very first message|say things together|mention (the )?(two|both)")


def scenario_facts(known: str, everything: str) -> dict[str, list[str]]:
    """Values that identify the customer and the case: topic -> values in order, those of known_info first."""
    facts = {t: list(dict.fromkeys(re.findall(p, known + "\n" + everything))) for t, p in VALUE_PATTERNS.items()}
    facts["zip"] = list(dict.fromkeys(re.findall(r"(?<![\w#$-])\d{5}\b", known)))
    facts["name"] = re.findall(r"(?:[Yy]ou are|[Yy]our? name is|[Yy]ou're|[Yy]our name:|called)\s+(?:user )?"
                               r"((?:[A-Z][\w'-]+)(?: [A-Z][\w'-]+)*)", known)[:1]
    return facts


@lru_cache(maxsize=4096)
def read_scenario(known: str, unknown: str, reason: str, instructions: str) -> ScenarioScript:
    """Sort the sentences of a tau2 scenario into wishes, notes and rules."""
    wishes, notes, rules, later, unknowns, wanted = [], [], [], [], [], False
    for sentence in split_sentences(re.sub(r",? but (?=(if|when) the agent asks)", ". But ", reason)):
        rule, text = parse_rule(sentence), first_person(sentence)
        choice = rule and re.search(r"several|multiple|options|\bonly\b|^so$", rule.trigger)
        if rule and (rule.kind != "note" or choice and wishes):
            rules.append(rule)
            continue
        if re.search(STAGE_WORDS, sentence, re.I) and wishes or not re.search(r"\w", text):
            continue
        if wishes and re.search(r"\bprefer|does(n't| not) matter|do(n't| not) (want|care|remember|know)|never want|not sure",
                                sentence) and not re.search(r"want(ed)? to|exchange|wish to", sentence):
            notes.append(text)
            continue
        wants = bool(re.search(WANT_WORDS, sentence, re.I) or
                     re.match(r"(and )?(also|finally|lastly|then|after|if)\b", sentence, re.I))
        same = re.search(r"(refund|payment|pay)\b", sentence) and not re.search(r"\balso|how much|cancel|return", sentence)
        if not wishes or wanted and wants and not same and not re.match(r"but (?!after)|in fact", sentence, re.I):
            wishes.append(text)
            wanted = wants
        else:
            wishes[-1] += " " + text
            wanted = wanted or wants
    for sentence in split_sentences(instructions):
        rule = parse_rule(sentence)
        if rule:
            rules.append(rule)
        elif re.search(r"^you (also|now|then) |^then |^lastly|^finally|suddenly|want to know", sentence, re.I) \
                and re.search(WANT_WORDS, sentence):
            later.append(first_person(sentence))
        elif not re.search(STAGE_WORDS, sentence, re.I) and (
                not re.match(r"you( are|'re) ", sentence, re.I) or re.search(r"willing|fine|\bok\b|happy with", sentence)):
            notes.append(first_person(sentence))  # "You are ..." alone is the character, not the case
    for sentence in split_sentences(unknown):
        rule = parse_rule(sentence)
        (rules if rule else unknowns).append(rule or first_person(sentence))
    notes += [first_person(s) for s in split_sentences(known)]
    everything = f"{reason}\n{instructions}"
    return ScenarioScript(tuple(wishes + later), tuple(notes), tuple(rules), scenario_facts(known, everything), tuple(unknowns),
                          one_go=bool(re.search(ONE_GO_WORDS, everything, re.I)),
                          insists=bool(re.search(r"\binsist|persistent|take no for", everything, re.I)))


def script_of(scenario) -> ScenarioScript:
    """ScenarioScript of a tau2 UserScenario; plain-text instructions count as the reason for calling."""
    ins = scenario.instructions
    if isinstance(ins, str):
        return read_scenario("", "", ins, "")
    return read_scenario(ins.known_info or "", ins.unknown_info or "", ins.reason_for_call, ins.task_instructions or "")


# ------------------------------------------------------------------ ScriptedUser: answering
def content_words(text: str) -> set[str]:
    """Words that carry meaning, with plural and -ing/-ed endings cut, for overlap between question and sentence."""
    words = re.findall(r"[a-z0-9#]+", text.lower())
    return {re.sub(r"(ies|es|s|ing|ed|e)$", "", w) if len(w) > 3 else w for w in words if w not in SMALL_WORDS}


def best_sentence(question: str, sentences: list[str]) -> str | None:
    """The sentence that shares most content words with the question; the first of equals; None when none shares any."""
    asked = content_words(question)
    best = max(sentences, key=lambda s: len(asked & content_words(s)), default="")
    return best if asked & content_words(best) else None


def asked_topics(question: str) -> list[str]:
    """Topics that a question of the agent is about, in the order of USER_TOPICS."""
    return [t for t, (asks, _, _) in USER_TOPICS.items() if re.search(asks, question)]


@dataclass
class Hearing:
    """One conversation as the scripted customer sees it; made anew for each turn."""
    script: ScenarioScript
    heard: list[str]     # the agent's texts
    said: list[str]      # the customer's texts
    seed: int
    turn: int            # messages so far

    def pick(self, *choices: str) -> str:
        """Seeded wording: the same conversation always gets the same words."""
        last = self.heard[-1] if self.heard else ""
        return choices[zlib.crc32(f"{self.seed}|{self.turn}|{last}".encode()) % len(choices)]

    def told(self, text: str) -> bool:
        return text in " ".join(self.said)

    def current(self) -> str:
        """The wish that was told last."""
        return next((w for w in reversed(self.script.wishes) if self.told(w)), "")

    def sentences(self) -> list[str]:
        return [*self.script.notes, *self.script.wishes, *(r.text for r in self.script.rules)]


class ScriptedUser:
    """The default customer: offline, deterministic, built from the scenario's own sentences."""
    name = "scripted"

    def reply(self, conversations: list) -> list[UserTurn]:
        """One turn for each conversation; nothing is kept between calls."""
        return [scripted_turn(c) for c in conversations]


def scripted_turn(conversation) -> UserTurn:
    """The customer's next turn: a pure function of seed, scenario and messages."""
    messages = conversation.messages
    texts = {role: [m["content"] for m in messages if m["role"] == role and m.get("content")]
             for role in ("assistant", "user")}
    me = Hearing(script_of(conversation.scenario), texts["assistant"], texts["user"], conversation.seed, len(messages))
    own = device_turn(me, conversation) if conversation.user_tools and me.said else None
    return own or UserTurn(text=scripted_text(me))


def scripted_text(me: Hearing) -> str:
    """Decide what to say to the agent's last message."""
    script, last = me.script, me.heard[-1] if me.heard else ""
    low = last.lower()
    says = {act for act, words in AGENT_SAYS.items() if re.search(words, low)}
    untold = [w for w in script.wishes if not me.told(w)]
    if "transfer" in says and not low.rstrip().endswith("?"):
        return USER_TRANSFER
    if not me.said:
        opening = " ".join(script.wishes if script.one_go else script.wishes[:1]) or "I need some help, please."
        return me.pick("Hi! ", "Hello. ", "") + opening
    answers, confirms = [], False
    for sentence in split_sentences(last):
        question = sentence.lower()
        if re.search(AGENT_SAYS["more"], question) or \
                re.search(AGENT_SAYS["open"], question) and not asked_topics(question):
            continue
        if re.search(AGENT_SAYS["confirm"], question) and not re.search(r"(confirm|verify) (me )?your", question):
            confirms = True
        elif re.search(AGENT_SAYS["ask"], question) and re.search(r"\?|please|need|provide|let me know", question):
            answers.append(answer_question(me, sentence))
    if "denied" in says:
        identity = set(asked_topics(low)) & {"email", "name", "zip", "user id"}
        rule = None if identity else next_rule(me, "denied")
        if rule:
            return rule.text
        if identity and not answers and not confirms:
            return " ".join(word_fact(me, t) for t in ("email", "name", "zip", "user id") if script.facts[t]) \
                or "I do not know more than that."
    if confirms:
        rule = next_rule(me, "confirm")
        return rule.text if rule else objection(me, low) or \
            " ".join([me.pick("Yes.", "Yes, please.", "Yes, go ahead.")] + answers)
    if answers:
        return " ".join(list(dict.fromkeys(answers))[:3])
    if "more" not in says:
        if "open" in says:
            repeat = me.said[-1:] == list(script.wishes[:1])
            return (untold or list(script.wishes) or ["I do not know."])[0] if not repeat else script.wishes[0]
        if "busy" in says:
            return me.pick("Okay.", "Okay, thank you.")
        if "denied" in says and not untold and not me.told("no other way"):
            return "Is there really no other way?"
        if not says & {"done", "denied"}:
            return on_small_talk(me)
    if script.insists and "denied" in says and " ".join(me.said).count("I insist") < 2:
        return "I insist. " + script.wishes[0]
    return untold[0] if untold else me.pick("Thank you, that is all. ", "No, that is all. Thanks! ", "Thanks, bye. ") + USER_STOP


def on_small_talk(me: Hearing) -> str:
    """A message that asks nothing: wait politely twice, then give up on an agent that makes no sense."""
    idle = 0
    while idle < len(me.said) and re.match(r"(Okay|Sorry, I do not understand)", me.said[-1 - idle]):
        idle += 1
    if idle >= 2 or idle and me.heard[-1:] == me.heard[-2:-1]:
        return "This does not help me. Goodbye. " + USER_STOP
    return "Sorry, I do not understand. What do you need from me?" if idle else me.pick("Okay.", "Okay, thank you.")


def next_rule(me: Hearing, kind: str) -> ScenarioRule | None:
    """The rule of this kind that was not used yet and fits the agent's message best; in order among equals.

    A rule about something in particular ("8 bar is not possible") needs a word of it in the message, unless the
    message names nothing in particular either ("Sorry, that is not possible.").
    """
    words = content_words(me.heard[-1])
    best, best_score = None, -1
    for rule in me.script.rules:
        about = content_words(rule.trigger)
        score = len(words & about)
        if rule.kind == kind and not me.told(rule.text) and score > best_score and \
                (score or kind == "confirm" or not about or len(words) <= 3):
            best, best_score = rule, score
    return best


ACTION_SYNONYMS = {"cancel": r"cancel|remov|refund|undo", "return": r"return|refund|money back|send back",
                   "exchange": r"exchang|swap|replac|chang|switch|instead|different|new|modif|upgrad|want"}
PAYMENT_SYNONYMS = {"gift": r"gift|\bgc\b", "paypal": r"paypal", "credit": r"credit|visa|master|amex|\bcc\b|card ending"}


def objection(me: Hearing, low: str) -> str | None:
    """What is wrong with the plan that the agent wants confirmed: order, action, reason or payment; None if nothing is.

    Only what contradicts the scenario counts; what the scenario leaves open is fine.
    """
    script, rules = me.script, [r.text for r in me.script.rules]
    everything = " ".join(me.sentences()).lower()
    named = [v.strip("#") for v in re.findall(VALUE_PATTERNS["order"].lower(), low)]
    own = [v.strip("#").lower() for v in script.facts["order"]]
    if own and named and not set(own) & set(named) and not re.search(
            r"other|another|pending|recent|\ball |\bany |both|orders|guess|not sure|not 100", everything):
        return f"No, I mean order {script.facts['order'][0]}."
    about = [w for w in script.wishes if any(n in w.lower() for n in named)]
    scope = " ".join(about + rules).lower() if about else everything
    plan = re.search(r"(?:me to|shall i|should i|can i|may i|i will|i'll|like to|want to|going to|you to) (\w+)", low)
    verb = plan.group(1) if plan else ""
    if verb in ACTION_SYNONYMS and not re.search(ACTION_SYNONYMS[verb], scope):
        return "No. " + (about or [me.current()])[0]
    for offered, wanted in (("mistake", "no longer need"), ("no longer need", "mistake")):
        if verb == "cancel" and offered in low and offered not in everything and wanted in everything:
            return "No. " + reason_clause(next(t for t in [*script.wishes, *script.notes, *rules] if wanted in t.lower()))
    paying = " ".join(t for t in rules if re.search(USER_TOPICS["payment"][1], t, re.I)).lower() or everything
    kinds, mine = ([k for k, p in PAYMENT_SYNONYMS.items() if re.search(p, t)] for t in (low, paying))
    if len(kinds) == 1 and len(mine) == 1 and kinds != mine and not re.search(r"original|other", everything):
        return "No. " + next(t for t in [*rules, *script.notes, *script.wishes] if re.search(PAYMENT_SYNONYMS[mine[0]], t, re.I))
    return None


def answer_question(me: Hearing, sentence: str) -> str:
    """Answer one question from the scenario; what the scenario does not give, the customer does not know."""
    question, facts = sentence.lower(), me.script.facts
    topics = asked_topics(question)
    for rule in me.script.rules:  # "If asked for your zip code, say ..." comes before the plain fact
        about = asked_topics(rule.trigger.lower())
        words = content_words(rule.trigger) or content_words(rule.text)
        if rule.kind == "asked" and not me.told(rule.text) and (
                set(topics) & set(about) if about else words & content_words(sentence)):
            return rule.text
    if "email" in topics and facts["email"] and len(topics) > 1:
        topics = ["email"] + [t for t in topics if t not in ("email", "name", "zip")]
    known = [t for t in topics if facts.get(t)]
    if set(topics) & {"name", "zip"} and not facts["name"] and facts["user id"] and "user id" not in known:
        known.insert(0, "user id")
    if known[:2] == ["zip", "name"]:
        return me.pick("I am {}, zip code {}.", "My name is {} and my zip code is {}.", "{}, {}.").format(
            facts["name"][0], " or ".join(facts["zip"]))
    if known:
        return " ".join(word_fact(me, t) for t in known)
    sentences = [*me.script.notes, *me.script.wishes, *(r.text for r in me.script.rules if r.kind in ("note", "asked"))]
    for topic in topics:
        unknown, about = ([s for s in source if re.search(USER_TOPICS[topic][1], s, re.I)]
                          for source in (me.script.unknown, sentences))
        found = best_sentence(question, about) or (about or [""])[0]
        if unknown or about:
            return reason_clause(found) if topic == "reason" and about else (unknown or [found])[0]
    if topics:
        return NOT_GIVEN.get(topics[0], f"I do not know my {topics[0]}.")
    found = best_sentence(question, [*sentences, *me.script.unknown])
    if not found and re.search(r"item|product|order|which one|what exactly|detail|do you want", question):
        found = me.current() or (me.script.wishes or ("I do not know.",))[0]
    return found or me.pick("I do not know.", "Sorry, I do not know that.")


def word_fact(me: Hearing, topic: str) -> str:
    """A known fact as a sentence; order numbers of the wish under discussion come before all others."""
    values = me.script.facts[topic]
    if topic in ("order", "reservation"):
        values = [v for v in values if v in me.current()] or values
    return USER_TOPICS[topic][2].format((" or " if topic == "zip" else " and ").join(values))


def reason_clause(sentence: str) -> str:
    """The reason alone: "I want to cancel it because I no longer need it." -> "Because I no longer need it." """
    m = re.search(r"\b(because|since|due to|as it)\b.*", sentence)
    return m.group(0)[:1].upper() + m.group(0)[1:] if m else sentence


# ------------------------------------------------------------------ ScriptedUser: the customer's own device (telecom)
LOOK_WORDS = r"\b(check\w*|shows?|displays?|is|are|does|what|which|see|look|verify|tell|returns|measures?|run|try|can you|send)\b"
CHANGE_WORDS = (r"\b(turn|toggl\w+|switch|enable|disable|reset\w*|reboot\w*|restart\w*|re-?(seat|insert)\w*|remov\w+|grants?|allow|"
                r"gives?|sets? |changes?|connects?|disconnects?|pay|makes?)\b")
AGENT_ACTS = r"^(i|we)('ve|'ll|'m| have| will| am| was| can)\b|\b(shall|should|may|can) i\b|(want|like) me to"
DEVICE_SYNONYMS = (
    (r"wi-fi", "wifi"), (r"re-insert", "reinsert"), (r"re-seat", "reseat"), (r"power[- ]cycl\w+|restart\w*", "reboot"),
    (r"\bpay\b", "make payment"), (r"(picture|multimedia) messages?", "mms"), (r"(turn|switch) off (your |the )?vpn|disable "
    r"(your |the )?vpn", "disconnect vpn"), (r"mode preference|network type|preferred network", "network mode preference"))


def device_words(text: str) -> set[str]:
    text = text.lower().replace("_", " ")
    for pattern, word in DEVICE_SYNONYMS:
        text = re.sub(pattern, word, text)
    return content_words(text)


def requested_tool(text: str, tools: list[dict]) -> dict | None:
    """The tool that the agent's words ask for: they share its rarest words, above all those of its name; or None."""
    text = " ".join(s for s in split_sentences(text) if not re.search(AGENT_ACTS, s.lower()))
    looks, changes = (m.start() if m else 10 ** 6 for m in (re.search(p, text.lower()) for p in (LOOK_WORDS, CHANGE_WORDS)))
    asked = device_words(text)
    words = {t["name"]: device_words(t["name"] + " " + t["description"]) for t in tools}

    def score(tool: dict) -> float:
        name = device_words(tool["name"])
        core = name - {"check", "statu", "run", "toggl", "set", "devic", "setting"}
        shared = sum((3 if w in name else 1) / sum(w in v for v in words.values()) for w in asked & words[tool["name"]])
        reads = bool(re.match(r"check|run|can", tool["name"]))
        return (shared + (len(core) if core <= asked else 0)) * (1.0 if min(looks, changes) < 10 ** 6 and
                                                                 reads == (looks < changes) else 0.15)

    best = max(tools, key=score)
    return best if score(best) >= 0.5 else None


def tool_arguments(tool: dict, text: str) -> dict | None:
    """Arguments that the agent's words give: an allowed value, or the word before "app" / "permission"; None: missing."""
    low, parameters, values = text.lower(), tool["parameters"], {}
    for name in parameters.get("required", []):
        kind = json.dumps(parameters["properties"][name])
        allowed = [v for d in parameters.get("$defs", {}).values() if f"/{d['title']}\"" in kind for v in d.get("enum", [])]
        spoken = {w for w in re.findall(r"\w+", low.replace("_", " "))}
        if allowed:
            best = max(allowed, key=lambda v: (len(spoken & set(v.split("_"))), v in low))
            found = best if spoken & set(best.split("_")) else None
        else:
            what = name.split("_")[0]
            hits = re.findall(rf"\b{what}s?(?: name)?:? (?:is |called |named )?['\"](\w+)|\b(?!(?:the|your|this|that|an?|each|to|of|"
                              rf"specific|default|any|app|which|following)\b)(\w+)['\"]? {what}", low)
            found = next((a or b for a, b in hits), None)
        if found is None:
            return None
        values[name] = found
    return values


def device_turn(me: Hearing, conversation) -> UserTurn | None:
    """Carry out what the agent asks for with the customer's own tools and report what they return.

    One action for each message (tau2's guideline); a switch that ended up on the wrong side is pressed again; whether
    the issue is over is looked up, never made up. None: the message is not about the device.
    """
    tools, messages = [t["function"] for t in conversation.user_tools], conversation.messages
    start = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    calls = [c for m in messages[start:] for c in m.get("tool_calls") or []]
    results = [m["content"] for m in messages[start:] if m["role"] == "tool"]
    text = me.heard[-1]
    low = re.sub(r"\bon (or|/) off\b", "", text.lower())
    goal = " ".join([*me.script.wishes, *(s for s in me.sentences() if "issue resolved" in s)]).lower()
    check = "can_send_mms" if "mms" in goal else "run_speed_test" if "internet" in goal else "check_status_bar"
    closing = re.search(AGENT_SAYS["more"] + r"|resolved|fixed|(working|works?) (now|again|fine|properly)|now work", low)
    if results:
        wanted = re.search(r"\b(?:turn|switch|toggle|put)\b[^.]*?\b(on|off)\b(?! your)|\b(enable|disable)\b", low)
        state = re.search(r"is now (on|off)", results[-1].lower())
        if len(calls) == 1 and wanted and state and ((wanted[1] or wanted[2]) in ("on", "enable")) != (state[1] == "on"):
            return UserTurn(tool_calls=calls)
        report = "; ".join(results[-1].split("\n"))
        if closing and calls[-1]["name"] == check:
            good = re.search("excellent" if check == "run_speed_test" else "can send|signal|poor|fair|good|excellent", report.lower()) \
                and not re.search(r"cannot|no signal|airplane", report.lower())
            return UserTurn(text=f"It works now, thank you! {USER_STOP}" if good else f"It still does not work. {report}")
        return UserTurn(text=report)
    if re.search(AGENT_SAYS["transfer"], low):
        return None
    tool = None if re.search(r"\b(full|your) name|phone number|e-?mail|address", low) else requested_tool(text, tools)
    if closing and not tool:
        return UserTurn(tool_calls=[{"name": check, "arguments": {}}])
    if not tool:
        return UserTurn(text="I do not know how to do that on my phone.") if re.search(r"^please|could you|can you", low) and \
            not asked_topics(low) and not re.search(AGENT_SAYS["confirm"], low) else None
    arguments = tool_arguments(tool, text)
    if arguments is None:
        return UserTurn(text="Which one exactly do you mean?")
    return UserTurn(tool_calls=[{"name": tool["name"], "arguments": arguments}])


# ------------------------------------------------------------------ customers that a model plays
def customer_view(conversation) -> tuple[str, list[dict]]:
    """What a model that plays the customer is shown: tau2's own guidelines with the scenario, and the roles swapped.

    Returns: (system prompt, messages); the agent speaks as "user", the customer's own turns are "assistant".
    """
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or importing tau2 waits for the network
    from tau2.user.user_simulator import SYSTEM_PROMPT, get_global_user_sim_guidelines
    system = SYSTEM_PROMPT.format(instructions=str(conversation.scenario), global_user_sim_guidelines=
                                  get_global_user_sim_guidelines(use_tools=bool(conversation.user_tools)))
    swap = {"assistant": "user", "user": "assistant"}
    return system, [{**m, "role": swap.get(m["role"], m["role"])} for m in conversation.messages]


def read_turn(text: str, calls: list[dict], conversation) -> UserTurn:
    """A model's answer as a turn; nothing said and nothing done, or a tool that is not there, is a fault."""
    names = [t["function"]["name"] for t in conversation.user_tools]
    wrong = [c["name"] for c in calls if c["name"] not in names]
    if wrong or not (calls or text.strip()):
        return UserTurn(fault=f"the customer's model called {wrong[0]!r}" if wrong else "the customer's model said nothing")
    return UserTurn(tool_calls=calls) if calls else UserTurn(text=text.strip())


class LLMUser:
    """A customer behind any OpenAI-compatible endpoint, with tau2's guidelines; waiting conversations are concurrent.

    Args:
        model: name that the endpoint knows. base_url: None is OpenAI itself.
        timeout_s: of one request. retries: further attempts after 408, 409, 429, 5xx, a broken or empty answer or no
            connection; the pause before them doubles from `pause_s`. deadline_s: of a whole turn.
    The key comes from OPENAI_API_KEY (local servers need none) and is cut out of every fault.
    """

    def __init__(self, model: str, base_url: str | None = None, *, timeout_s: float = 60.0, retries: int = 3,
                 pause_s: float = 1.0, deadline_s: float = 240.0, workers: int = 64):
        from openai import OpenAI
        key = os.environ.get("OPENAI_API_KEY", "")
        if not key and base_url is None:
            raise ValueError("no OPENAI_API_KEY in the environment and no base URL of a server that needs none")
        self.name, self.model, self.workers = f"llm:{model}", model, workers
        self.retries, self.pause_s, self.deadline_s = retries, pause_s, deadline_s
        self.client = OpenAI(api_key=key or "none", base_url=base_url, timeout=timeout_s, max_retries=0)

    def reply(self, conversations: list) -> list[UserTurn]:
        """All conversations at once; a turn that is not there by the deadline is a fault, and nobody waits for it."""
        pool = ThreadPoolExecutor(min(self.workers, max(1, len(conversations))))
        end = time.monotonic() + self.deadline_s
        jobs = [pool.submit(self._turn, c, end) for c in conversations]
        turns = []
        for job in jobs:
            try:
                turns.append(job.result(timeout=max(0.0, end - time.monotonic())))
            except LateError:
                turns.append(UserTurn(fault=f"{self.name}: no answer within {self.deadline_s:g} s"))
        pool.shutdown(wait=False, cancel_futures=True)
        return turns

    def _turn(self, conversation, end: float) -> UserTurn:
        from openai import APIConnectionError, APIStatusError, OpenAIError
        system, messages = customer_view(conversation)
        request = [{"role": "system", "content": system}] + openai_messages(messages)
        tools = {"tools": conversation.user_tools} if conversation.user_tools else {}
        reason = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(max(0.0, min(self.pause_s * 2 ** (attempt - 1), end - time.monotonic())))
            if time.monotonic() >= end:
                break
            try:
                answer = self.client.chat.completions.create(model=self.model, messages=request, seed=conversation.seed, **tools)
                said = answer.choices[0].message
                calls = [{"name": c.function.name, "arguments": json.loads(c.function.arguments or "{}")}
                         for c in said.tool_calls or []]
                turn = read_turn(said.content or "", calls, conversation)
                if not turn.fault:
                    return turn
                reason = turn.fault
            except (OpenAIError, ValueError, AttributeError, TypeError, IndexError) as error:  # the last four: broken JSON
                status = getattr(error, "status_code", None)
                reason = f"{type(error).__name__}{f' {status}' if status else ''}: {str(error)[:200]}"
                if isinstance(error, APIStatusError) and status < 500 and status not in (408, 409, 429):
                    break
        key = self.client.api_key
        clean = re.sub(r"sk-[\w*-]+", "***", reason.replace(key, "***") if key != "none" else reason)
        return UserTurn(fault=f"{self.name}: {clean} (attempt {attempt + 1} of {self.retries + 1})")


def openai_messages(messages: list[dict]) -> list[dict]:
    """Our messages in the wire format, which ties each tool result to its call by an id."""
    wire, waiting = [], []
    for i, m in enumerate(messages):
        out = {"role": m["role"], "content": m.get("content") or ""}
        if m.get("tool_calls"):
            waiting = [f"call_{i}_{j}" for j in range(len(m["tool_calls"]))]
            out["tool_calls"] = [{"id": call_id, "type": "function", "function": {
                "name": c["name"], "arguments": json.dumps(c["arguments"])}} for call_id, c in zip(waiting, m["tool_calls"])]
        elif m["role"] == "tool":
            out["tool_call_id"], waiting = waiting[0], waiting[1:]
        wire.append(out)
    return wire


class PolicyUser:
    """The policy's own frozen base plays the customer: same weights, LoRA adapter off, tau2's guidelines, its own cache.

    Args:
        model: a PEFT model (its adapter is switched off while the customer speaks), or with `frozen` a copy that nobody
            trains. chat: chat.Chat. generate_turns, make_row: rollout.generate_turns and rollout.Row.
        max_context: tokens of one conversation. temperature: 0 is greedy.
    Raises: ValueError for full weights, which change while they train, and for the small policy, which reads no rules.
    """

    def __init__(self, model, chat, generate_turns, make_row, *, frozen: bool = False, max_context: int = 16384,
                 max_new_tokens: int = 256, temperature: float = 0.0):
        if not frozen and not hasattr(model, "disable_adapter"):
            raise ValueError("the policy can play the customer only with a LoRA adapter, or as a frozen copy (--ref-copy): "
                             "full weights change while they train, and with them the customer")
        if chat.family == "tiny":
            raise ValueError("the small policy cannot play the customer: its prompt holds no instructions")
        self.name, self.model, self.chat = "policy", model, chat
        self.generate_turns, self.make_row = generate_turns, make_row
        self.max_context, self.max_new_tokens, self.temperature = max_context, max_new_tokens, temperature
        self.rows, self.cache = {}, None  # conversation key -> (row, messages it holds)

    def reply(self, conversations: list) -> list[UserTurn]:
        """One turn each, all rows in one batch; rows keep their tokens and keys from turn to turn."""
        if all(len(c.messages) == 1 for c in conversations):  # new episodes: the old ones are over
            self.rows, self.cache = {}, None
        rows = [self._hear(c) for c in conversations]
        able = [r for r in rows if len(r.ids) < self.max_context]
        absent = {k: h for k, h in self.cache.held.items() if k not in map(id, able)} if self.cache else {}
        if able:
            with self.model.disable_adapter() if hasattr(self.model, "disable_adapter") else nullcontext():
                self.cache = self.generate_turns(
                    self.model, able, stop_ids=self.chat.stop_ids, pad_id=self.chat.pad_id, cache=self.cache,
                    max_new_tokens=self.max_new_tokens, temperature=self.temperature)
            self.cache.held.update(absent)  # conversations in which the agent is still at work
        return [self._turn(c, r) if r in able else UserTurn(fault=f"{c.key}: the customer's context is full")
                for c, r in zip(conversations, rows)]

    def _hear(self, conversation):
        """The conversation's row with everything said since the customer's last turn appended."""
        system, messages = customer_view(conversation)
        row, held = self.rows.get(conversation.key, (None, 0))
        if row is None or held >= len(messages):
            row = self.make_row([], f"user/{conversation.key}", self.max_context)
            row.hear(self.chat.prompt_ids(system, conversation.user_tools, messages))
        else:
            row.hear(self.chat.suffix_ids(row.sampled, messages[held:]))
        self.rows[conversation.key] = (row, len(messages) + 1)  # + 1: the turn that it is about to say
        return row

    def _turn(self, conversation, row) -> UserTurn:
        action = self.chat.parse(row.sampled)
        try:
            call = json.loads(action) if action[:1] in ("{", "[") else {}
        except ValueError:
            call = {}
        calls = call.get("tool_calls", [call]) if isinstance(call, dict) else call
        calls = [c for c in calls if isinstance(c, dict) and isinstance(c.get("arguments"), dict) and "name" in c]
        return read_turn("" if calls else action, calls, conversation)


class ReplayUser:
    """Plays recorded turns back, or (`record`) lets another customer speak and writes its turns to the same file.

    A turn is found by a hash of the seed, the scenario and all messages so far; while recording, a conversation that
    is already in the file gets the recorded turn, so a replay gives exactly what the recording gave. Faults are not
    recorded. Raises ValueError for a file that is missing (without `record`) or that holds a broken line.
    """

    def __init__(self, path: str | Path, record=None):
        self.path, self.record = Path(path), record
        self.name = record.name if record else "replay"
        self.turns = {}
        if not self.path.exists() and record is None:
            raise ValueError(f"no recorded conversations at {self.path}")
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                self.turns[row["key"]] = UserTurn(**row["turn"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: not a recorded turn ({error})") from None

    def reply(self, conversations: list) -> list[UserTurn]:
        keys = [conversation_hash(c) for c in conversations]
        new = {k: c for k, c in zip(keys, conversations) if k not in self.turns}
        fresh = {}
        if self.record and new:
            fresh = dict(zip(new, self.record.reply(list(new.values()))))
            with self.path.open("a") as file:
                for key, turn in fresh.items():
                    if not turn.fault:
                        self.turns[key] = turn
                        file.write(json.dumps({"key": key, "where": new[key].key, "turn": asdict(turn)}) + "\n")
        missing = {k: UserTurn(fault=f"{self.path} holds no turn for {c.key} after message {len(c.messages)}: "
                                     f"{c.messages[-1].get('content', '')[:80]!r}") for k, c in new.items()}
        return [self.turns.get(k) or fresh.get(k) or missing[k] for k in keys]


def conversation_hash(conversation) -> str:
    """The conversation so far as a key: seed, scenario, every message."""
    text = json.dumps([conversation.seed, str(conversation.scenario), conversation.messages], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
