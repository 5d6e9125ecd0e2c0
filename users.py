"""The other speaker: four customers that talk to the policy, none of which can spoil a run.

`reply(conversations) -> turns` is batched, so that many episodes wait once. A turn is text (with one of tau2's stop
words when the customer is done), calls of the customer's own tools, or a fault, which the environment turns into
the outcome `user_error` and never into a reward.

`ScriptedUser` (the default) keeps no state: each turn is a function of the seed, the scenario and the messages so
far. It reads tau2's scenario sentence by sentence, turns "You want ..." into "I want ...", and answers what is asked
from those sentences. It has no field for evaluation criteria or gold actions, so it cannot read them.
"""
import re
import zlib
from dataclasses import dataclass, field
from functools import lru_cache

USER_STOP, USER_TRANSFER = "###STOP###", "###TRANSFER###"  # tau2/user/base.py


@dataclass
class UserTurn:
    """What the customer does: says something, uses its own tools, or (fault) cannot go on for reasons of the world."""
    text: str = ""
    tool_calls: list[dict] = field(default_factory=list)  # [{"name", "arguments"}]
    fault: str | None = None


# ------------------------------------------------------------------ ScriptedUser: reading the scenario
@dataclass(frozen=True)
class ScenarioRule:
    """A sentence "if X, then Y" of the scenario: what to say (in the first person) when the agent brings X about."""
    kind: str     # "confirm" (asked to confirm), "asked" (asked about X), "denied" (X is impossible), "note"
    trigger: str  # X, as written
    text: str     # Y, in the first person


@dataclass(frozen=True)
class ScenarioScript:
    """A scenario as the customer uses it: what to ask for, what to answer, what to say when something happens."""
    wishes: tuple[str, ...]        # told one after another, or all at once
    notes: tuple[str, ...]         # told when asked about
    rules: tuple[ScenarioRule, ...]
    facts: dict[str, list[str]]    # topic -> values, from known_info first
    unknown: tuple[str, ...]       # "I do not remember my email address."
    one_go: bool                   # all wishes in the first turn
    insists: bool                  # does not take the first no for an answer


# Topic -> (how the agent asks about it, which sentences of the scenario answer it).
USER_TOPICS = {
    "email": (r"e-?mail", r"e-?mail|@"),
    "zip": (r"\bzip|postal", r"\bzip"),
    "name": (r"\bname\b(?! of)", r"\bname is\b"),
    "user id": (r"user ?id|username|user name|account id|customer id", r"user id"),
    "order": (r"order (numbers?|ids?|#)|(which|what)( \w+)? orders?\b", r"\border\b"),
    "reservation": (r"(reservation|confirmation|booking) (ids?|numbers?|codes?|reference)|which reservation",
                    r"reservation|confirmation number"),
    "phone": (r"phone number|mobile number|line number", r"phone number"),
    "address": (r"(?<!mail )(?<!mail)\baddress|\bstreet\b|where do you live",
                r"\baddress\b|\blive\b|living|residing|\b(suite|street|drive|avenue|highway|st)\b"),
    "birthday": (r"date of birth|birthday|\bdob\b", r"birth|\bdob\b"),
    "payment": (r"payment|\bpay\b|paying|refund(ed)? (method|to)|which card|credit card|gift card|paypal",
                r"\bpay\b|payment|gift ?card|\bgc\b|paypal|credit card|visa|master ?card|amex|certificate|card ending"),
    "reason": (r"\breason\b|\bwhy\b", r"because|\breason\b|by mistake|no longer need|\bsince\b|due to"),
    "budget": (r"budget|how much .*(willing|spend)", r"\$\d"),
}
VALUE_PATTERNS = {
    "email": r"[\w.+-]+@[\w-]+\.\w+",
    "user id": r"\b[a-z]+_[a-z]+_\d+\b",
    "order": r"#W\d{7}\b|\bW\d{7}\b",
    "reservation": r"\b(?=[A-Z0-9]*[A-Z])[A-Z0-9]{6}\b",
    "phone": r"\b\d{3}-\d{3}-\d{4}\b",
}
FACT_WORDING = {"email": "My email is {}.", "user id": "My user id is {}.", "zip": "My zip code is {}.",
                "name": "My name is {}.", "order": "The order number is {}.",
                "reservation": "The reservation is {}.", "phone": "My phone number is {}."}
DENIAL_WORDS = (r"\bcannot|can't|\bcan not|unable|not (be )?(possible|available|allowed|eligible|permitted)|n't (possible|"
                r"available|allowed|eligible)|not able|no longer available|does not allow|n't (work|allow)|"
                r"basic economy|\bdenied|refuse|there (is|are) no\b|could not|couldn't|not found|not work")
TRANSFER_WORDS = (r"being transferred|transferring you|have transferred you|been transferred|"
                  r"will (now )?transfer you|i am transferring|i'll transfer you")
CONFIRM_WORDS = (r"yes/no|yes or no|\byes\b|do you (want|wish) me to|would you like me to|would you like to (proceed|"
                 r"continue|go ahead)|shall (i|we)|should i|can i (go ahead|proceed)|may i (go ahead|proceed)|"
                 r"do you (confirm|agree|approve)|please confirm|you confirm|(ok|okay|fine|ready) to (proceed|go)|"
                 r"is (that|this|it|everything) (all )?(correct|right|ok|okay|fine)|proceed\?|go ahead\?")
ASK_WORDS = (r"\b(what|which|who|whom|where|when|how|why)\b|(may|can|could|might) i (please )?(have|get|ask|know)|"
             r"provide|\bshare\b|\btell me\b|give me|\bneed (your|the|to know)|let me know|(verify|confirm) your|specify|"
             r"describe|is there|are there|do you (know|have|remember)|did you|are you")
MORE_WORDS = (r"(any|some)thing else|what else|else (can|may|could) i|further (assist|help|request)|other (request|"
              r"questions)|anything more|additional (help|assist)")
OPEN_WORDS = (r"how (can|may|could) i (help|assist)|what (can|may) i do|what do you need|what would you like|"
              r"how can i be of|what brings you|help you (with )?today|assist you (with )?today|"
              r"what (is|are) your (request|issue|problem)|what do you want")
DONE_WORDS = (r"\bdone\b|(has|have) (now )?been|complete|success|processed|\bis now\b|\bare now\b|updated|all set|"
              r"confirmed|cancell?ed\b|changed|resolved")
BUSY_WORDS = r"\b(let me|one moment|next,|now i|i will now|i'll now|moving on|please wait|please hold)\b"
SMALL_WORDS = frozenset("""a an the of to for from in on at by with and or but not no yes do does did is are was were be
been have has had i me my mine you your yours it its this that these those them they there here what which who whom
whose when where why how may can could would should shall will please provide tell know need want like wish help any
some all also just as if so agent item items order orders product products one ones get got give let me am us we our
about into out up ask asks asked possible available work more most than then much many long exactly sure specific today now would prefer different new
okay able want's make made think thing things kind type""".split())


def split_sentences(text: str) -> list[str]:
    """Cut scenario or agent text into sentences; list lines ("- add 3 bags") stay with the sentence before them."""
    text = re.sub(r"\s*\n\s*[-*]\s+", " - ", text or "")
    text = re.sub(r",\s*\n\s*", ", ", text)
    parts = re.split(r"(?<=[.!?;])(?<!\b[A-Z]\.)(?<!\bSt\.)(?<!\bDr\.)(?<!\be\.g\.)(?<!\.\.\.)[\"')]*\s+|\n+|\.\.\.\s+",
                     text)
    parts = [p.strip().lstrip(".,; ") for p in parts]
    return [p for p in parts if re.search(r"\w\w", p)]


def first_person(sentence: str) -> str:
    """Turn an instruction to the customer into what the customer says: "You want your bag" -> "I want my bag."

    Parentheses that tell the actor what to hide are dropped; "the agent" becomes "you".
    """
    s = re.sub(r"\s*\([^()]*\b(reveal|mention|hide|you know|do not|don't)\b[^()]*\)\.?", "", sentence, flags=re.I).strip()
    s = re.sub(r",? but do(n't| not) (reveal|mention)[^.]*", "", s)
    s = re.sub(r"\b[Yy]ou name is\b", "your name is", s).replace("(your forgot", "(you forgot")
    s = re.sub(r"\b(?:[Yy]ou )?(?:also )?(?:explicitly )?(?:[Aa]sk|want) (?:the )?agent (?:explicitly )?to\b", "please", s)
    s = re.sub(r"\b(?:[Yy]ou )?(?:can )?(?:also )?[Aa]sk the agent(?: explicitly)? (?=how|wh|if|for|about)",
               "please tell me ", s)
    s = s.replace("please tell me for", "I would like")
    s = re.sub(r"\b[Tt]he (?:service |customer service )?agents?\b", "@A", s)
    s = re.sub(r"\b[Aa]re you\b", "am @I", s)
    s = re.sub(r"\b[Yy]ou(?:'re| are)\b", "@I am", s)
    s = re.sub(r"\b[Yy]ou were\b", "@I was", s)
    s = re.sub(r"\b[Yy]ourself\b", "myself", s)
    s = re.sub(r"\b[Yy]ours\b", "mine", s)
    s = re.sub(r"\b[Yy]our\b", "my", s)
    s = re.sub(r"\b(to|for|with|from|asks?|asked|tells?|told|gives?|give|helps?|lets?|allows?|charge|offers?|contact|"
               r"gets?|sends?|of|about|suits?|saves?|informs?|remind) [Yy]ou\b(?!')(?! (want|will|can|have|had|just|"
               r"would|do|did|live|already|ordered|received|bought|purchased|placed|need|like|prefer)\b)", r"\1 me", s)
    s = re.sub(r"\b[Yy]ou\b", "@I", s)
    s = s.replace("@I", "I")
    s = re.sub(r"@A('s)", "your", s)
    s = re.sub(r"@A is\b", "you are", s)
    s = re.sub(r"@A has\b", "you have", s)
    s = re.sub(r"@A (doesn't|does not)\b", "you don't", s)
    s = re.sub(r"@A (ask|say|tell|find|offer|refuse|make|insist|provide|give|agree|mention|allow)(e?s)\b", r"you \1", s)
    s = s.replace("@A", "you").strip(" ,;-")
    s = re.sub(r"\s+", " ", s)
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
    s = re.sub(r"^(say|says|mention|tell (the )?agent|respond|answer|insist)( explicitly)?( that)?( it's| it is)?\s+(?=\w)",
               lambda m: "it is " if m.group(5) else "", s)
    s = re.sub(r" (initially|first)(?=\.?$)", "", s)
    s = re.sub(r"^((?:also |only )?(?:want|prefer)|would|don't|do not|ask|need|like|wish|regret|wonder|accept|have|go|'d|allow|decide|change "
               r"(?:your|my) mind|are|feel|agree)\b", r"you \1", s)
    s = re.sub(r"^you (do not|don't) (?=exchange|cancel|return|make|process|do\b)", r"please \1 ", s)
    s = re.sub(r"^you ask (to be|to get) ", r"you want \1 ", s)
    s = re.sub(r"^you ask (to|for) (?=\w)", lambda m: "please " if m.group(1) == "to" else "you would like ", s)
    if re.match(r"(only |also |try to |try )?(exchange|cancel|return|change|use|keep|pick|go|choose|book|drop|move|upgrade|"
                r"refund|modify|switch|add|remove|transfer|proceed|take|make)\b", s):
        s = "please " + s
    return first_person(s)


def parse_rule(sentence: str) -> ScenarioRule | None:
    """Read "If/When X, Y" (or "Y, if X" about being asked) into a rule; None when the sentence is not conditional."""
    s = re.sub(r"^(But|And|Also|However),? ", "", sentence, flags=re.I)
    head = r"(?:if and only if|only if|only after|if|when|in case|once)\b\s*"
    m = re.match(head + r"((?:[^(]|\([^)]*\))+?),\s*(?:then\s+)?(?=you\b|you'|please|say|mention|ask)(.+)", s, re.I | re.S) \
        or re.match(head + r"((?:[^(]|\([^)]*\))+?)(?:,\s*(?:then\s+)?|\s+then\s+)(.+)", s, re.I | re.S)
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
    else:
        kind = "note"
    text = rule_consequence(effect)
    if kind == "note" and not re.search(r"several|multiple", trigger):  # a preference among what there is: the condition belongs to what is said
        text = first_person(s)
    return ScenarioRule(kind, trigger, text)


WANT_WORDS = r"\b(want|wants|wish|like to|need|wonder|ask|request|inquire|check|try to|looking (for|to)|please|'d like)\b"
STAGE_WORDS = (r"make sure (you|to)|do(n't| not) (reveal|mention|volunteer|end the|ask for comp|accept the)|^mention |"
               r"will not say anything|more information than|^be |^sound |make everything sound|at the same time|"
               r"ground your responses|^for example|tool call|^you like to (say|do|talk)|conversation as confusing|"
               r"randomly insert|speak (very )?brief|^you are (a|an|very|extremely|polite|in debt|reactive|not good|\w+, )|"
               r"end each of your|this is incorrect|^insist|take no for|tactics|in one go")


def scenario_facts(known: str, everything: str) -> dict[str, list[str]]:
    """Collect the values that identify the customer and the case: topic -> values in order, known_info first."""
    facts = {}
    for topic, pattern in VALUE_PATTERNS.items():
        facts[topic] = list(dict.fromkeys(re.findall(pattern, known + "\n" + everything)))
    facts["zip"] = list(dict.fromkeys(re.findall(r"(?<![\w#$-])\d{5}\b", known)))
    name = re.search(r"(?:[Yy]ou are|[Yy]our? name is|[Yy]ou're|[Yy]our name:|called)\s+(?:user )?"
                     r"((?:[A-Z][\w'-]+)(?: [A-Z][\w'-]+)*)", known)
    facts["name"] = [name.group(1)] if name else []
    return facts


@lru_cache(maxsize=4096)
def read_scenario(known: str, unknown: str, reason: str, instructions: str) -> ScenarioScript:
    """Sort the sentences of a tau2 scenario into wishes, notes and rules."""
    wishes, notes, rules, wanted = [], [], [], False
    for sentence in split_sentences(re.sub(r",? but (?=(if|when) the agent asks)", ". But ", reason)):
        rule = parse_rule(sentence)
        choice = rule and re.search(r"several|multiple|options|\bonly\b|^so$", rule.trigger)
        if rule and (rule.kind != "note" or choice and wishes):
            rules.append(rule)
            continue
        if re.search(STAGE_WORDS, sentence, re.I) and wishes or not re.search(r"\w", first_person(sentence)):
            continue
        if wishes and re.search(r"\bprefer|does(n't| not) matter|do(n't| not) (want|care|remember|know)|never want|not sure",
                                sentence) and not re.search(r"want(ed)? to|exchange|wish to", sentence):
            notes.append(first_person(sentence))
            continue
        wants = bool(re.search(WANT_WORDS, sentence, re.I))
        same = re.search(r"(refund|payment|pay)\b", sentence) and not re.search(r"\balso|how much|cancel|return", sentence)
        wants = wants or bool(re.match(r"(and )?(also|finally|lastly|then|after|if)\b", sentence, re.I))
        if not wishes or wanted and wants and not same and not re.match(r"but (?!after)|in fact", sentence, re.I):
            wishes.append(first_person(sentence))
            wanted = wants
        else:
            wishes[-1] += " " + first_person(sentence)
            wanted = wanted or wants
    known_sentences = [first_person(s) for s in split_sentences(known)]
    later = []
    for sentence in split_sentences(instructions):
        rule = parse_rule(sentence)
        if rule:
            rules.append(rule)
        elif re.search(r"^you (also|now|then) |^then |^lastly|^finally|suddenly|want to know", sentence, re.I) \
                and re.search(WANT_WORDS, sentence):
            later.append(first_person(sentence))
        elif re.match(r"you( are|'re) ", sentence, re.I) and not re.search(r"willing|fine|\bok\b|happy with", sentence):
            continue  # the character, not the case
        elif not re.search(STAGE_WORDS, sentence, re.I):
            notes.append(first_person(sentence))
    unknown_sentences = []
    for sentence in split_sentences(unknown):
        rule = parse_rule(sentence)
        rules += [rule] if rule else []
        unknown_sentences += [] if rule else [first_person(sentence)]
    everything = f"{reason}\n{instructions}"
    one_go = re.search(r"in one go|same time|(all (two|three)|two|both) (things|requests|problems)|all requests|"
                       r"(details|everything) upfront|very first message|say things together|mention (the )?(two|both)",
                       everything, re.I)
    insists = re.search(r"\binsist|persistent|take no for", everything, re.I)
    return ScenarioScript(tuple(wishes + later), tuple(notes + known_sentences), tuple(rules),
                          scenario_facts(known, everything), tuple(unknown_sentences), bool(one_go), bool(insists))


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
    scored = [(len(asked & content_words(s)), -i) for i, s in enumerate(sentences)]
    score, index = max(scored, default=(0, 0))
    return sentences[-index] if score > 0 else None


class ScriptedUser:
    """The default customer: offline, deterministic, built from the scenario's own sentences."""
    name = "scripted"

    def reply(self, conversations: list) -> list[UserTurn]:
        """One turn for each conversation (env_tau2.Conversation); nothing is kept between calls."""
        return [scripted_turn(c) for c in conversations]


def scripted_turn(conversation) -> UserTurn:
    """The customer's next turn: a pure function of seed, scenario and messages."""
    script = script_of(conversation.scenario)
    messages = conversation.messages
    heard = [m["content"] for m in messages if m["role"] == "assistant" and m.get("content")]
    said = [m["content"] for m in messages if m["role"] == "user" and m.get("content")]
    last = heard[-1] if heard else ""

    def pick(*choices: str) -> str:
        """Seeded wording: the same conversation always gets the same words."""
        return choices[zlib.crc32(f"{conversation.seed}|{len(messages)}|{last}".encode()) % len(choices)]

    return UserTurn(text=scripted_text(script, heard, said, pick))


def scripted_text(script: ScenarioScript, heard: list[str], said: list[str], pick) -> str:
    """Decide what to say to the agent's last message; `pick` chooses among wordings."""
    last, told = heard[-1] if heard else "", " ".join(said)
    low = last.lower()
    untold = [w for w in script.wishes if w not in told]
    if re.search(TRANSFER_WORDS, low) and not low.rstrip().endswith("?"):
        return USER_TRANSFER
    if not said:
        opening = " ".join(script.wishes if script.one_go else script.wishes[:1]) or "I need some help, please."
        return pick("Hi! ", "Hello. ", "") + opening
    answers, confirms = [], False
    for sentence in split_sentences(last):
        question = sentence.lower()
        more = re.search(MORE_WORDS, question)
        if more or re.search(OPEN_WORDS, question) and not asked_topics(question):
            continue
        if re.search(CONFIRM_WORDS, question) and not re.search(r"(confirm|verify) (me )?your", question):
            confirms = True
        elif re.search(ASK_WORDS, question) and ("?" in question or re.search(r"please|need|provide|let me know", question)):
            answers.append(answer_question(script, sentence, told, pick))
    if re.search(DENIAL_WORDS, low):
        identity = set(asked_topics(low)) & {"email", "name", "zip", "user id"}
        rule = None if identity else next_rule(script, "denied", last, told)
        if rule:
            return rule.text
        if identity and not answers and not confirms:
            return " ".join(wording_of(script, t, told) for t in ("email", "name", "zip", "user id")
                            if script.facts[t]) or "I do not know more than that."
    if confirms:
        rule = next_rule(script, "confirm", last, told)
        wrong = None if rule else objection(script, low, told)
        return rule.text if rule else wrong or " ".join([pick("Yes.", "Yes, please.", "Yes, go ahead.")] + answers)
    answers = list(dict.fromkeys(a for a in answers if a))
    if answers:
        return " ".join(answers[:3])
    if re.search(OPEN_WORDS, low) and not re.search(MORE_WORDS, low):
        return (untold or list(script.wishes) or ["I do not know."])[0] if not said[-1:] == script.wishes[:1] \
            else script.wishes[0]
    if re.search(BUSY_WORDS, low) and not re.search(MORE_WORDS, low):
        return pick("Okay.", "Okay, thank you.")
    if re.search(DENIAL_WORDS, low) and not re.search(MORE_WORDS, low) and not untold and "no other way" not in told:
        return "Is there really no other way?"
    if re.search(MORE_WORDS, low) or re.search(DONE_WORDS, low) or re.search(DENIAL_WORDS, low):
        return next_wish(script, low, told, untold, pick)
    return on_small_talk(heard, said, pick)


def next_wish(script: ScenarioScript, low: str, told: str, untold: list[str], pick) -> str:
    """After a piece of work or a refusal: insist once where the scenario says so, else the next wish, else goodbye."""
    if script.insists and re.search(DENIAL_WORDS, low) and told.count("I insist") < 2:
        return "I insist. " + script.wishes[0]
    if untold:
        return untold[0]
    return pick("Thank you, that is all. ", "No, that is all. Thanks! ", "Thanks, bye. ") + USER_STOP


def on_small_talk(heard: list[str], said: list[str], pick) -> str:
    """A message that asks nothing: wait politely twice, then give up on an agent that makes no sense."""
    idle = 0
    for text in reversed(said):
        if not re.match(r"(Okay|Sorry, I do not understand)", text):
            break
        idle += 1
    if idle >= 2 or len(heard) >= 2 and heard[-1] == heard[-2] and idle >= 1:
        return "This does not help me. Goodbye. " + USER_STOP
    return pick("Okay.", "Okay, thank you.") if idle == 0 else "Sorry, I do not understand. What do you need from me?"


def next_rule(script: ScenarioScript, kind: str, last: str, told: str) -> ScenarioRule | None:
    """The rule of this kind that was not used yet and fits the agent's message best; in order among equals.

    A rule about something in particular ("8 bar is not possible") needs a word of it in the message, unless the
    message names nothing in particular either ("Sorry, that is not possible.").
    """
    words = content_words(last)
    best, best_score = None, -1
    for rule in script.rules:
        about = content_words(rule.trigger) - {"confirm", "confirmation"}
        score = len(words & about)
        if rule.kind == kind and rule.text not in told and score > best_score and \
                (score or kind == "confirm" or not about or len(words) <= 3):
            best, best_score = rule, score
    return best


def asked_topics(question: str) -> list[str]:
    """Topics that a question of the agent is about, in the order of USER_TOPICS."""
    return [t for t, (asks, _) in USER_TOPICS.items() if re.search(asks, question)]


ACTION_SYNONYMS = {"cancel": r"cancel|remov|refund|undo", "return": r"return|refund|money back|send back",
                   "exchange": r"exchang|swap|replac|chang|switch|instead|different|new|modif|upgrad|want"}
PAYMENT_SYNONYMS = {"gift": r"gift|\bgc\b", "paypal": r"paypal", "credit": r"credit|visa|master|amex|\bcc\b|card ending"}


def objection(script: ScenarioScript, low: str, told: str) -> str | None:
    """What is wrong with the plan that the agent wants confirmed: order, action, reason or payment; None if nothing is.

    Only what contradicts the scenario counts; what the scenario leaves open is fine.
    """
    everything = " ".join(script.wishes + script.notes + tuple(r.text for r in script.rules)).lower()
    current = next((w for w in reversed(script.wishes) if w in told), "")
    named = [v.strip("#") for v in re.findall(VALUE_PATTERNS["order"].lower(), low)]
    own = [v.strip("#").lower() for v in script.facts["order"]]
    if own and named and not set(own) & set(named) and not re.search(
            r"other|another|pending|recent|\ball |\bany |both|orders|guess|not sure|not 100", everything):
        return f"No, I mean order {script.facts['order'][0]}."
    about = [w for w in script.wishes if any(n in w.lower() for n in named)]
    scope = " ".join(about + [r.text for r in script.rules]).lower() if about else everything
    plan = re.search(r"(?:me to|shall i|should i|can i|may i|i will|i'll|like to|want to|going to|you to) (\w+)", low)
    verb = plan.group(1) if plan else ""
    if verb in ACTION_SYNONYMS and not re.search(ACTION_SYNONYMS[verb], scope):
        return "No. " + (about or [current])[0]
    for offered, wanted in (("mistake", "no longer need"), ("no longer need", "mistake")):
        if verb == "cancel" and offered in low and offered not in everything and wanted in everything:
            return "No. " + reason_clause(next(t for t in list(script.wishes) + list(script.notes) + [
                r.text for r in script.rules] if wanted in t.lower()))
    kinds = [k for k, p in PAYMENT_SYNONYMS.items() if re.search(p, low)]
    asked = " ".join(r.text for r in script.rules if re.search(USER_TOPICS["payment"][1], r.text, re.I)).lower() or everything
    mine = [k for k, p in PAYMENT_SYNONYMS.items() if re.search(p, asked)]
    if len(kinds) == 1 and len(mine) == 1 and kinds != mine and not re.search(r"original|other", everything):
        return "No. " + next(t for t in [r.text for r in script.rules] + list(script.notes) + list(script.wishes)
                             if re.search(PAYMENT_SYNONYMS[mine[0]], t, re.I))
    return None


def answer_question(script: ScenarioScript, sentence: str, told: str, pick) -> str:
    """Answer one question from the scenario; what the scenario does not give, the customer does not know."""
    question = sentence.lower()
    topics = asked_topics(question)
    for rule in script.rules:  # "If asked for your zip code, say ..." comes before the plain fact
        about = asked_topics(rule.trigger.lower())
        words = content_words(rule.trigger) or content_words(rule.text)
        if rule.kind == "asked" and rule.text not in told and (
                set(topics) & set(about) if about else words & content_words(sentence)):
            return rule.text
    facts = script.facts
    if "email" in topics and facts["email"] and len(topics) > 1:
        topics = ["email"] + [t for t in topics if t not in ("email", "name", "zip")]
    known = [t for t in topics if facts.get(t)]
    if set(topics) & {"name", "zip"} and not facts["name"] and facts["user id"] and "user id" not in known:
        known.insert(0, "user id")
    if known[:2] == ["zip", "name"]:
        return pick("I am {}, zip code {}.", "My name is {} and my zip code is {}.", "{}, {}.").format(
            facts["name"][0], " or ".join(facts["zip"]))
    if known:
        return " ".join(wording_of(script, t, told) for t in known)
    sentences = list(script.notes) + list(script.wishes) + [r.text for r in script.rules if r.kind in ("note", "asked")]
    for topic in topics:
        about = [s for s in sentences if re.search(USER_TOPICS[topic][1], s, re.I)]
        unknown = [s for s in script.unknown if re.search(USER_TOPICS[topic][1], s, re.I)]
        if topic == "reason" and about:
            return reason_clause(best_sentence(question, about) or about[0])
        if unknown or about:
            return (unknown or [best_sentence(question, about) or about[0]])[0]
    if topics:
        return {"payment": "I have no preference.", "reason": "I have no special reason.", "zip": "I do not know my zip code.",
                "order": "I do not know the order number.", "reservation": "I do not know the reservation number.",
                "budget": "I have no limit in mind."}.get(topics[0], f"I do not know my {topics[0]}.")
    found = best_sentence(question, sentences + list(script.unknown))
    if found:
        return found
    if re.search(r"item|product|order|which one|what exactly|detail|do you want", question):
        return next((w for w in reversed(script.wishes) if w in told), script.wishes[0] if script.wishes else "I do not know.")
    return pick("I do not know.", "Sorry, I do not know that.")


def wording_of(script: ScenarioScript, topic: str, told: str) -> str:
    """A known fact as a sentence; order numbers of the wish under discussion come before all others."""
    values = script.facts[topic]
    if topic in ("order", "reservation"):
        current = next((w for w in reversed(script.wishes) if w in told), "")
        values = [v for v in values if v in current] or values
    return FACT_WORDING[topic].format((" or " if topic == "zip" else " and ").join(values))


def reason_clause(sentence: str) -> str:
    """The reason alone: "I want to cancel it because I no longer need it." -> "Because I no longer need it." """
    m = re.search(r"\b(because|since|due to|as it)\b.*", sentence)
    return m.group(0)[:1].upper() + m.group(0)[1:] if m else sentence
