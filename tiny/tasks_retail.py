"""Synthetic retail tasks in tau2's own format, each verified when it is made: what the small policy learns on.

A task is one customer of tau2's retail database with one to three wishes. Every wish carries its gold tool calls, so
an oracle can act it out (tiny/warm_start.py) and tau2's own evaluator can judge any agent on it.

Levels: 1 one plain wish, order named, customer known by e-mail; 2 one wish with more to copy, e-mail or name and zip;
3 payment and profile changes, orders to be found from an item, two wishes; 4 exchanges by option, refunds to a gift
card; 5 a wish that must be refused beside a rightful one, or three wishes.

    python -m tiny.tasks_retail --n 1000 --seed 0 --split train --out tasks.json
"""
import argparse
import hashlib
import itertools
import json
import os
import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or importing tau2 waits for the network

# Share of each level when none are named: mostly what 20 minutes of learning can reach, a few that it can not.
LEVEL_SHARES = {1: 0.30, 2: 0.40, 3: 0.20, 4: 0.06, 5: 0.04}
SYNTHETIC_SPLITS = ("train", "val")
SMALL_PRODUCT = 12          # exchanges only within products of at most this many variants: their details stay short
CANCEL_REASONS = {
    "no longer needed": ("because you no longer need it", "as it is no longer needed",
                         "since you do not need it anymore"),
    "ordered by mistake": ("because you ordered it by mistake", "as it was ordered by mistake",
                           "since you bought it by accident"),
}
PAYMENT_WORDS = {"gift_card": "gift card", "paypal": "PayPal account", "credit_card": "credit card"}
PERSONA_LINES = ("You are polite.", "You are brief and direct.", "You are friendly.", "You are in a hurry.")


@dataclass
class Wish:
    """One thing a customer wants: `text` is all the user knows, `calls` and `fact` are gold."""
    kind: str
    text: str                     # scenario sentence in tau2's second person ("You want to ...")
    calls: list = field(default_factory=list)     # [(tool name, arguments)], the write last
    answer: str = ""              # what the agent has to say when there is no write: the fact, or the refusal
    fact: str | None = None       # a string that tau2's evaluator looks for in the agent's words
    order_id: str | None = None   # wishes of one task never share an order
    ask: str = ""                 # how the agent asks for the go-ahead: with the details, as the policy demands


@lru_cache(maxsize=1)
def retail_data() -> dict:
    """tau2's retail database as plain JSON (read only) and the customers of tau2's own test tasks.

    Returns: {"users", "orders", "products", "test_users": set of user ids}.
    """
    from tau2.domains.retail.environment import get_tasks
    from tau2.domains.retail.utils import RETAIL_DB_PATH
    data = json.loads(Path(RETAIL_DB_PATH).read_text("utf-8"))
    data["test_users"] = set()
    for task in get_tasks("test"):
        text = task.model_dump_json().lower()
        for user_id, user in data["users"].items():
            first, last, zip_code = user["name"]["first_name"], user["name"]["last_name"], user["address"]["zip"]
            named = first.lower() in text and last.lower() in text and zip_code in text
            if named or user_id in text or any(order.lower() in text for order in user["orders"]):
                data["test_users"].add(user_id)
    return data


@lru_cache(maxsize=2)
def split_customers(split: str) -> tuple[str, ...]:
    """User ids of a split: by hash of the id a fifth validate, the rest train; tau2's test customers do neither."""
    if split not in SYNTHETIC_SPLITS:
        raise ValueError(f"split {split!r} is not one of {SYNTHETIC_SPLITS}")
    tested = retail_data()["test_users"]
    held_out = {u: int(hashlib.sha256(u.encode()).hexdigest(), 16) % 5 == 0 for u in retail_data()["users"]}
    return tuple(u for u in sorted(held_out) if u not in tested and held_out[u] == (split == "val"))


def orders_of(user_id: str, *statuses: str) -> list[dict]:
    """The user's orders with one of these statuses (any when none is named)."""
    orders = [retail_data()["orders"][order_id] for order_id in retail_data()["users"][user_id]["orders"]]
    return [order for order in orders if not statuses or order["status"] in statuses]


def read_record(sort: str, record_id: str) -> tuple:
    """The call that looks up an "order", a "user" or a "product"."""
    return (f"get_{sort}_details", {f"{sort}_id": record_id})


def lone_items(order: dict) -> list[dict]:
    """Items whose product occurs once in the order, so that its name says which one is meant."""
    names = [item["name"] for item in order["items"]]
    return [item for item in order["items"] if names.count(item["name"]) == 1]


def pick_address(rng: random.Random, split: str) -> tuple[dict, str]:
    """A new address and how to say it: street words, city and zip code from the split's customers, numbers made up."""
    users = retail_data()["users"]
    ids = split_customers(split)
    street, place = users[rng.choice(ids)]["address"]["address1"].split(" ", 1)[1], users[rng.choice(ids)]["address"]
    address = {"address1": f"{rng.randint(100, 999)} {street}", "address2": f"Suite {rng.randint(100, 999)}",
               "city": place["city"], "state": place["state"], "country": "USA", "zip": place["zip"]}
    return address, "{address1}, {address2}, {city}, {state} {zip}".format(**address)


# ---- the kinds of wish; each returns None where this customer has nothing that fits

def wish_cancel(rng, user_id, split, used, find=False):
    """Cancel a pending order, named or (find) described by an item that is in no other order of the customer."""
    orders = [o for o in orders_of(user_id, "pending") if o["order_id"] not in used]
    if not orders:
        return None
    order = rng.choice(orders)
    reason = rng.choice(sorted(CANCEL_REASONS))
    why = rng.choice(CANCEL_REASONS[reason])
    reads, name = [read_record("order", order["order_id"])], f"order {order['order_id']}"
    if find:
        reads, item = find_by_item(rng, user_id, order)
        if item is None:
            return None
        name = f"the order with the {item['name']}"
    text = rng.choice(("You want to cancel {name} {why}.", "You would like to cancel {name} {why}.",
                       "You need {name} cancelled {why}.")).format(name=name, why=why)
    calls = reads + [("cancel_pending_order", {"order_id": order["order_id"], "reason": reason})]
    return Wish("cancel_found" if find else "cancel", text, calls, order_id=order["order_id"],
                ask=f"Shall I cancel order {order['order_id']}, reason {reason} (yes/no)?")


def find_by_item(rng, user_id, order):
    """The reads of an agent that goes through the customer's orders until it meets the item; (calls, item or None)."""
    ids = retail_data()["users"][user_id]["orders"]
    others = [item["name"] for o in orders_of(user_id) if o is not order for item in o["items"]]
    items = [item for item in lone_items(order) if item["name"] not in others]
    if not items or len(ids) > 3:
        return [], None
    upto = ids[:ids.index(order["order_id"]) + 1]
    return [read_record("user", user_id)] + [read_record("order", order_id) for order_id in upto], rng.choice(items)


def wish_return(rng, user_id, split, used, find=False, to_gift_card=False):
    """Return one item of a delivered order; the refund goes to the original payment method or to the gift card."""
    orders = [o for o in orders_of(user_id, "delivered") if o["order_id"] not in used and lone_items(o)]
    if not orders:
        return None
    order = rng.choice(orders)
    item, reads = rng.choice(lone_items(order)), [read_record("order", order["order_id"])]
    where, payment = f" from order {order['order_id']}", order["payment_history"][0]["payment_method_id"]
    if find:
        reads, item = find_by_item(rng, user_id, order)
        where = ""
        if item is None:
            return None
    money = rng.choice((" for a refund the way you paid", " and get the money back the way you paid"))
    if to_gift_card:
        cards = [p for p in retail_data()["users"][user_id]["payment_methods"] if p.startswith("gift_card")]
        if len(cards) != 1 or cards[0] == payment:
            return None
        money, payment, reads = " for a refund to your gift card", cards[0], [read_record("user", user_id)] + reads
    verb = rng.choice(("return", "send back"))
    text = f"You {rng.choice(('want', 'would like'))} to {verb} the {item['name']}{where}{money}."
    call = ("return_delivered_order_items", {"order_id": order["order_id"], "item_ids": [item["item_id"]],
                                             "payment_method_id": payment})
    kind = "return_gift_card" if to_gift_card else "return_found" if find else "return"
    return Wish(kind, text, reads + [call], order_id=order["order_id"],
                ask=f"Shall I return the {item['name']} item {item['item_id']} of order {order['order_id']}, "
                    f"refund to {payment} (yes/no)?")


def wish_order_address(rng, user_id, split, used):
    """Send a pending order elsewhere."""
    orders = [o for o in orders_of(user_id, "pending") if o["order_id"] not in used]
    if not orders:
        return None
    order, (address, said) = rng.choice(orders), pick_address(rng, split)
    text = rng.choice(("You want to have order {o} sent to {a} instead.",
                       "You would like to change the address of order {o} to {a}."))
    call = ("modify_pending_order_address", {"order_id": order["order_id"], **address})
    calls = [read_record("order", order["order_id"]), call]
    return Wish("order_address", text.format(o=order["order_id"], a=said), calls, order_id=order["order_id"],
                ask=f"Shall I send order {order['order_id']} to {address['address1']} (yes/no)?")


def wish_user_address(rng, user_id, split, used):
    """Change the address in the customer's profile."""
    address, said = pick_address(rng, split)
    text = rng.choice(("You want to change your default address to {a}.",
                       "You would like to have {a} as your new default address."))
    call = ("modify_user_address", {"user_id": user_id, **address})
    return Wish("user_address", text.format(a=said), [call],
                ask=f"Shall I change your address to {address['address1']} (yes/no)?")


def wish_payment(rng, user_id, split, used):
    """Pay for a pending order with another of the customer's payment methods, named by its sort."""
    methods = retail_data()["users"][user_id]["payment_methods"]
    choices = []
    for order in orders_of(user_id, "pending"):
        paid = order["payment_history"]
        for method_id, method in methods.items():
            alone = sum(m["source"] == method["source"] for m in methods.values()) == 1
            enough = method["source"] != "gift_card" or method["balance"] >= paid[0]["amount"]
            fresh = order["order_id"] not in used and len(paid) == 1 and paid[0]["payment_method_id"] != method_id
            if alone and enough and fresh:
                choices.append((order, method_id, PAYMENT_WORDS[method["source"]]))
    if not choices:
        return None
    order, method_id, word = rng.choice(choices)
    text = rng.choice(("You want to pay for order {o} with your {w} instead.",
                       "You would like to change the payment of order {o} to your {w}."))
    call = ("modify_pending_order_payment", {"order_id": order["order_id"], "payment_method_id": method_id})
    calls = [read_record("user", user_id), read_record("order", order["order_id"]), call]
    return Wish("payment", text.format(o=order["order_id"], w=word), calls, order_id=order["order_id"],
                ask=f"Shall I charge order {order['order_id']} to {method_id} (yes/no)?")


def wish_lookup(rng, user_id, split, used, what=None):
    """A fact that stands in an order: what it cost, what an item cost, or where the parcel is."""
    orders = [o for o in orders_of(user_id) if o["order_id"] not in used]
    if not orders:
        return None
    order, what = rng.choice(orders), what or rng.choice(("price", "tracking"))
    order_id = order["order_id"]
    if what == "paid":
        fact = str(order["payment_history"][0]["amount"])
        text = rng.choice((f"You want to know how much you paid for order {order_id}.",
                           f"You would like to know the total of order {order_id}."))
        answer = f"It was payment {fact} in total."
    elif what == "price" and lone_items(order):
        item = rng.choice(lone_items(order))
        fact = str(item["price"])
        text = rng.choice((f"You want to know the price of the {item['name']} in order {order_id}.",
                           f"You would like to know what the {item['name']} in order {order_id} cost."))
        answer = f"I see {item['name']} item {item['item_id']} price {fact}."
    elif what == "tracking" and order["fulfillments"]:
        fact = order["fulfillments"][0]["tracking_id"][0]
        text = rng.choice((f"You want to know the tracking number of order {order_id}.",
                           f"You would like to have the tracking number for order {order_id}."))
        answer = f"It is tracking {fact}."
    else:
        return None
    return Wish(what, text, [read_record("order", order["order_id"])], answer=answer, fact=fact, order_id=order_id)


def wish_swap(rng, user_id, split, used):
    """Exchange a delivered item, or change a pending one, for the variant that the named options single out."""
    orders = [o for o in orders_of(user_id, "delivered", "pending") if o["order_id"] not in used]
    stock = {product_id: list(p["variants"].values()) for product_id, p in retail_data()["products"].items()}
    choices = [(order, item) for order in orders for item in lone_items(order)
               if len(stock[item["product_id"]]) <= SMALL_PRODUCT]
    if not choices:
        return None
    order, item = rng.choice(choices)
    variants = stock[item["product_id"]]
    new = rng.choice(variants)
    options = naming_options(new, variants)
    if not new["available"] or new["item_id"] == item["item_id"] or options is None:
        return None
    spec = " and ".join(f"{name} {new['options'][name]}" for name in options)
    delivered = order["status"] == "delivered"
    verb = "exchange" if delivered else "change"
    where = f"the {item['name']} in order {order['order_id']}"
    text = f"You {rng.choice(('want', 'would like'))} to {verb} {where} for the one with {spec}."
    call = ("exchange_delivered_order_items" if delivered else "modify_pending_order_items",
            {"order_id": order["order_id"], "item_ids": [item["item_id"]], "new_item_ids": [new["item_id"]],
             "payment_method_id": order["payment_history"][0]["payment_method_id"]})
    calls = [read_record("order", order["order_id"]), read_record("product", item["product_id"]), call]
    return Wish("exchange" if delivered else "modify_items", text, calls, order_id=order["order_id"],
                ask=f"Shall I {verb} the {item['name']} item {item['item_id']} for item {new['item_id']}, "
                    f"payment {call[1]['payment_method_id']} (yes/no)?")


def naming_options(variant: dict, variants: list[dict]) -> tuple | None:
    """The fewest options that no other variant shares: ('color',) or ('color', 'size'); None where nothing does."""
    for count in (1, 2):
        for subset in itertools.combinations(sorted(variant["options"]), count):
            if sum(all(v["options"].get(n) == variant["options"][n] for n in subset) for v in variants) == 1:
                return subset
    return None


def wish_refused(rng, user_id, split, used):
    """Something the policy forbids: the wrong status, someone else's order, or another kind of product."""
    sort = rng.choice(("cancel", "return", "stranger", "product"))
    pending = [o for o in orders_of(user_id, "pending", "processed") if o["order_id"] not in used]
    done = [o for o in orders_of(user_id, "delivered") if o["order_id"] not in used]
    if sort == "cancel" and done:
        order = rng.choice(done)
        text = f"You want to cancel order {order['order_id']} {rng.choice(CANCEL_REASONS['no longer needed'])}."
        answer = f"I am sorry, order {order['order_id']} is delivered and can not be cancelled."
    elif sort == "return" and pending:
        order = rng.choice(pending)
        text = f"You want to return the {order['items'][0]['name']} from order {order['order_id']}."
        answer = f"I am sorry, order {order['order_id']} is {order['status']} and can not be returned."
    elif sort == "stranger":
        other = rng.choice([u for u in split_customers(split) if u != user_id and orders_of(u, "pending")])
        order = rng.choice(orders_of(other, "pending"))
        text = f"You want to cancel order {order['order_id']} {rng.choice(CANCEL_REASONS['ordered by mistake'])}."
        answer = f"I am sorry, order {order['order_id']} is not yours."
    elif sort == "product" and done:
        order = rng.choice(done)
        names = {item["name"] for item in order["items"]}
        products = sorted(p["name"] for p in retail_data()["products"].values() if p["name"] not in names)
        text = (f"You want to exchange the {order['items'][0]['name']} in order {order['order_id']} "
                f"for a {rng.choice(products)}.")
        return Wish("refuse_product", text, [], order_id=order["order_id"],
                    answer="I am sorry, it can only be exchanged for the same product.")
    else:
        return None
    order_id = order["order_id"]
    return Wish(f"refuse_{sort}", text, [read_record("order", order_id)], answer=answer, order_id=order_id)


def draw_wishes(rng: random.Random, level: int, user_id: str, split: str) -> list[Wish] | None:
    """The wishes of one task of this level, or None when the customer's orders do not allow what was drawn."""
    plain = [wish_cancel, wish_return, wish_order_address, lambda *a: wish_lookup(*a, what="paid"), wish_lookup]
    if level == 1:
        makers = [rng.choice([plain[0], plain[3]])]
    elif level == 2:
        makers = [rng.choice([wish_return, wish_return, wish_order_address, wish_lookup, wish_cancel])]
    elif level == 3:
        single = [wish_payment, wish_user_address, lambda *a: wish_return(*a, find=True),
                  lambda *a: wish_cancel(*a, find=True)]
        makers = [rng.choice(single)] if rng.random() < 0.5 else [rng.choice(plain), rng.choice(plain)]
    elif level == 4:
        makers = [rng.choice([wish_swap, wish_swap, wish_swap, lambda *a: wish_return(*a, to_gift_card=True)])]
    elif level == 5:
        rest = [rng.choice(plain)] if rng.random() < 0.7 else [rng.choice(plain), rng.choice(plain)]
        makers = [wish_refused] + rest if len(rest) == 1 else [wish_payment] + rest
        rng.shuffle(makers)
    else:
        raise ValueError(f"level {level!r} is not one of {sorted(LEVEL_SHARES)}")
    wishes, used = [], set()
    for maker in makers:
        wish = maker(rng, user_id, split, used)
        if wish is None:
            return None
        used |= {wish.order_id} - {None}
        wishes.append(wish)
    return wishes


def retail_task(task_id: str, user_id: str, wishes: list[Wish], by_email: bool, rng: random.Random):
    """A tau2 Task from a customer and the wishes; the plan stands in description.notes, which users never see."""
    from tau2.data_model.tasks import Task
    user = retail_data()["users"][user_id]
    name = f"{user['name']['first_name']} {user['name']['last_name']}"
    if by_email:
        known, unknown = f"You are {name}. Your email is {user['email']}.", None
        find = ("find_user_id_by_email", {"email": user["email"]})
    else:
        zip_code, unknown = user["address"]["zip"], "You do not remember your email address."
        known, find = f"You are {name} in zip code {zip_code}.", ("find_user_id_by_name_zip", {
            "first_name": user["name"]["first_name"], "last_name": user["name"]["last_name"], "zip": zip_code})
    texts = [wishes[0].text] + [w.text.replace("You ", "You also ", 1) for w in wishes[1:]]
    calls = [find] + [call for wish in wishes for call in wish.calls]
    actions = [{"action_id": f"{task_id}_{i}", "name": call[0], "arguments": call[1], "info": None}
               for i, call in enumerate(calls)]
    notes = [{"kind": w.kind, "calls": len(w.calls), "answer": w.answer, "ask": w.ask} for w in wishes]
    scenario = {"persona": None, "instructions": {
        "domain": "retail", "reason_for_call": " ".join(texts), "known_info": known, "unknown_info": unknown,
        "task_instructions": rng.choice(PERSONA_LINES)}}
    return Task.model_validate({
        "id": task_id,
        "description": {"purpose": f"synthetic, level {task_level(task_id)}", "notes": json.dumps(notes)},
        "user_scenario": scenario, "initial_state": None,
        "evaluation_criteria": {"actions": actions, "communicate_info": [w.fact for w in wishes if w.fact is not None],
                                "nl_assertions": None}})


@lru_cache(maxsize=1)
def retail_toolkit():
    """tau2's retail tools on a database of their own, for replaying gold; gold_changes puts back what it touches."""
    from tau2.domains.retail.data_model import RetailDB
    from tau2.domains.retail.tools import RetailTools
    from tau2.domains.retail.utils import RETAIL_DB_PATH
    return RetailTools(RetailDB.load(RETAIL_DB_PATH))


def gold_changes(task, user_id: str) -> bool:
    """Replay the gold calls on tau2's tools; True when the database ends up different.

    Raises: ValueError where a gold call is refused by the tool (tau2's own message).
    """
    tools = retail_toolkit()
    db = tools.db
    orders = {o: db.orders[o].model_copy(deep=True) for o in db.users[user_id].orders}
    user = db.users[user_id].model_copy(deep=True)
    try:
        for action in task.evaluation_criteria.actions:
            tools.use_tool(action.name, **action.arguments)
        return db.users[user_id] != user or any(db.orders[o] != before for o, before in orders.items())
    finally:
        db.users[user_id] = user
        db.orders.update(orders)


def verified(task, user_id: str) -> bool:
    """Gold succeeds and doing nothing pays 0: the database must change or a fact must be told that the prompt lacks."""
    facts = task.evaluation_criteria.communicate_info
    if any(len(fact) < 4 or fact in str(task.user_scenario) for fact in facts):
        return False
    try:
        return gold_changes(task, user_id) or bool(facts)
    except ValueError:  # a tool refused a gold call, e.g. a gift card that can not cover the difference
        return False


def make_tasks(n: int, seed: int, split: str = "train", levels=None) -> list:
    """n verified tasks, the same for the same arguments.

    Args:
        levels: levels to draw from, evenly (e.g. (1, 2)); None draws by LEVEL_SHARES.
    Returns: tau2 Task objects with ids like "train-0_L2_return_00017".
    """
    rng = random.Random(f"tasks/{seed}/{split}")
    customers = [u for u in split_customers(split) if retail_data()["users"][u]["orders"]]
    shares = LEVEL_SHARES if levels is None else {level: 1.0 for level in levels}
    tasks = []
    while len(tasks) < n:
        level = rng.choices(list(shares), weights=list(shares.values()))[0]
        task = None
        while task is None:  # another customer until one fits, so that the shares of the levels hold
            user_id = rng.choice(customers)
            wishes = draw_wishes(rng, level, user_id, split)
            if wishes is None:
                continue
            by_email = level == 1 or rng.random() < 0.5
            kinds = "+".join(w.kind for w in wishes)
            made = retail_task(f"{split}-{seed}_L{level}_{kinds}_{len(tasks):05d}", user_id, wishes, by_email, rng)
            task = made if verified(made, user_id) else None
        tasks.append(task)
    return tasks


def task_level(task_id: str) -> int:
    return int(task_id.split("_")[1][1:])


def tasks_main() -> None:
    """Write tasks as a JSON list that tau2's own loaders accept."""
    parser = argparse.ArgumentParser(description=tasks_main.__doc__)
    parser.add_argument("--n", type=int, default=1000, help="how many tasks")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same tasks")
    parser.add_argument("--split", default="train", choices=SYNTHETIC_SPLITS, help="disjoint customers")
    parser.add_argument("--out", default="tasks.json", help="file to write")
    args = parser.parse_args()
    tasks = make_tasks(args.n, args.seed, args.split)
    Path(args.out).write_text(json.dumps([task.model_dump(mode="json") for task in tasks], indent=1), encoding="utf-8")
    levels = {level: sum(task_level(t.id) == level for t in tasks) for level in LEVEL_SHARES}
    print(f"{len(tasks)} verified tasks, by level {levels}, written to {args.out}")


if __name__ == "__main__" and "__file__" in globals():
    tasks_main()
