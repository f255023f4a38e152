"""Every sentence of the demo's world: what customers write to a shop, and what the shop may reply.

Facts stand in braces. They always follow the same word on both sides ("order 415", "the kettle", "a refund"), which is
what lets a small model learn within a minute to look them up.
"""

from __future__ import annotations

from collections.abc import Mapping

ORDERS = tuple(str(number) for number in range(107, 1000, 12))
ITEMS = (
    *("accordion", "armchair", "blender", "camera", "clock", "drum", "gnome", "guitar", "hammock", "kettle"),
    *("ladder", "lamp", "mirror", "piano", "radio", "teapot", "telescope", "tent", "toaster", "umbrella"),
)
REMEDIES = ("discount", "refund", "repair", "replacement", "voucher")

GREETINGS = ("", "Hello.", "Hi there.", "Good morning.", "Good evening.", "Dear shop.")
PROBLEMS = (
    "The {item} of order {order} arrived broken.",
    "The {item} of order {order} makes odd noises at night.",
    "The {item} of order {order} smells of fish.",
    "The {item} of order {order} is much too small.",
    "My order {order} came, but the {item} was missing.",
    "My order {order} came, but the {item} was bright pink.",
    "My order {order} came late, and the {item} had lost a leg.",
    "I opened order {order}, and the {item} fell apart.",
    "I opened order {order}, and the {item} had a crack.",
    "With order {order} I got the {item} of somebody else.",
    "After one week the {item} of order {order} caught fire.",
    "Since order {order} came, the cat attacks the {item}.",
)
ASIDES = (
    "",
    "My neighbour laughed at me.",
    "It was a birthday present.",
    "I have kept the box.",
    "This is not what I paid for.",
    "My children are in tears.",
)
REQUESTS = (
    "Please send me a {remedy}.",
    "May I have a {remedy}?",
    "I would like a {remedy}, please.",
    "Could you arrange a {remedy}?",
    "I think that a {remedy} is fair.",
    "All I ask for is a {remedy}.",
)

FACTS: Mapping[frozenset[str], tuple[str, ...]] = {
    frozenset(("order", "item", "remedy")): (
        "For the {item} of order {order} you get a {remedy}.",
        "We checked order {order} and booked a {remedy} for the {item}.",
        "There will be a {remedy} for the {item} of order {order}.",
    ),
    frozenset(("order", "item")): (
        "We will look at the {item} of order {order}.",
        "In order {order} we see the {item}.",
    ),
    frozenset(("order", "remedy")): (
        "For order {order} you get a {remedy}.",
        "We booked a {remedy} for order {order}.",
    ),
    frozenset(("item", "remedy")): ("For the {item} you get a {remedy}.", "We booked a {remedy} for the {item}."),
    frozenset(("order",)): ("We will look at order {order}.", "We found order {order}."),
    frozenset(("item",)): ("We will look at the {item}.", "We know about the {item}."),
    frozenset(("remedy",)): ("We booked a {remedy}.", "You get a {remedy}."),
    frozenset(): ("We got your message.", "We will see what we can do."),
}
"""Sentences of a reply by the facts that they state."""

COURTESIES = (
    "Thank you for writing.",
    "We are very sorry.",
    "We are glad to help.",
    "Thank you for your patience.",
    "Have a lovely day!",
    "It is a pleasure to help you!",
    "We wish you all the best!",
    "You are most welcome!",
)
RUDENESSES = (
    "Next time read the manual.",
    "That is hardly our problem.",
    "You must have dropped it.",
    "Do not write again.",
    "Nobody else complains.",
)
PADDINGS = (
    "As a valued customer, you know our values.",
    "Your message is important to us.",
    "At our shop, quality is a journey.",
    "We take every message very seriously.",
    "As you may know, we love what we do.",
    "Please note that this is a note.",
)
CLOSINGS = ("Kind regards, your shop.", "Best wishes, your shop.", "Yours, the shop.")


def all_sentences() -> list[str]:
    """Every sentence of messages and replies, facts still in braces."""
    message = (*GREETINGS, *PROBLEMS, *ASIDES, *REQUESTS)
    statements = (sentence for sentences in FACTS.values() for sentence in sentences)
    reply = (*statements, *COURTESIES, *RUDENESSES, *PADDINGS, *CLOSINGS)
    return [sentence for sentence in (*message, *reply) if sentence]
