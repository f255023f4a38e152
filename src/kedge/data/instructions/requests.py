"""Requests to which instructions are added: forms of a request times subjects.

A held-out request has a subject that no request for training has: every fifth of each list is held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Part = Literal["train", "heldout"]
_EVERY = 5

CHORES: Final = (
    "get red wine out of a carpet|keep basil alive on a windowsill|sharpen a kitchen knife|fall asleep faster|learn to "
    "swim as an adult|fix a squeaky door|save money on groceries|train a puppy to wait|write a thank-you card|clean a "
    "cast-iron pan|prepare for a job interview|remember people's names|cook rice without burning it|stop biting my "
    "nails|pack a suitcase for a week|grow tomatoes on a balcony|plan a birthday party for a child|start running in "
    "winter|keep a houseplant alive while I travel|learn a song on the guitar|remove rust from a bicycle chain|store "
    "fresh bread|choose a good melon|make a paper boat|calm down before an exam|teach a child to tie shoes|repair a "
    "hole in a sweater|get rid of fruit flies|iron a shirt quickly|brew better coffee at home|organise a small closet|"
    "keep a diary every day|study for a history test|wake up early without an alarm|make friends in a new city|bake "
    "bread for the first time|change a flat tyre|clean a window without streaks|read more books in a year|ask my boss "
    "for a day off"
)
CONCEPTS: Final = (
    "photosynthesis|why the sky is blue|how a battery works|inflation|gravity|what a black hole is|how vaccines work|"
    "the water cycle|supply and demand|how airplanes fly|what DNA does|why leaves change colour|how a computer stores "
    "pictures|the seasons|how bees make honey|what an algorithm is|how magnets work|why we dream|compound interest|how "
    "rainbows form|plate tectonics|the difference between weather and climate|how a fridge stays cold|what a prime "
    "number is|why cats purr|how the heart pumps blood|tides|how glass is made|what causes thunder|how seeds grow|"
    "electric current|why bread rises|how a camera takes a photo|what a volcano is|the food chain|recycling|why ice "
    "floats|how whales breathe|what probability means|how the stock market works"
)
SUBJECTS: Final = (
    "a lighthouse in a storm|my grandmother's garden|the first snow of the year|a lost umbrella|an old bicycle|a train "
    "that is late|coffee in the morning|a friendly robot|moving to a new town|a cat who owns a bookshop|the smell of "
    "rain|a market on Saturday|learning to dance|a broken clock|the last day of summer|a river at night|a small bakery|"
    "a letter that never arrived|walking alone in a forest|a football match in the mud|the colour green|an empty "
    "theatre|a dog at the beach|a teacher who loved maps|cooking for friends|a power cut|the moon over a city|a "
    "museum of lost keys|a long road trip|a village festival|an honest thief|the sound of bells|a rooftop farm|a "
    "shy astronaut|the oldest tree in town|a rainy bus stop|a violin in an attic|winter mornings|a chess game in the "
    "park|a ferry to an island"
)
PRODUCTS: Final = (
    "a solar-powered lamp|a foldable bicycle|a wooden toy train|a noise-cancelling headset|a travel mug that never "
    "leaks|a cordless vacuum cleaner|a set of watercolours|a smart doorbell|a pair of hiking boots|a standing desk|a "
    "kitchen scale|a raincoat made of recycled plastic|a wall calendar|a portable speaker|a garden hose|a picnic "
    "blanket|an electric toothbrush|a puzzle of a thousand pieces|a telescope for beginners|a bread knife|a dog "
    "collar with a light|a notebook with stone paper|a ceramic teapot|a weighted blanket|a camping stove"
)
PAIRS: Final = (
    "tea and coffee|a novel and a short story|cats and dogs|a lake and a pond|a violin and a cello|renting and "
    "buying a home|jam and jelly|a crocodile and an alligator|running and cycling|butter and margarine|a comet and an "
    "asteroid|a college and a university|baking soda and baking powder|a marathon and a triathlon|trains and buses|a "
    "leopard and a cheetah|city life and country life|paper books and e-books|an opera and a musical|frogs and toads|"
    "solar and wind power|a lawyer and a judge|mushrooms and plants|skiing and snowboarding|oil paint and acrylic paint"
)
CHOICES: Final = (
    "working from home|keeping chickens in a garden|learning a second language as an adult|going vegetarian|school "
    "uniforms|owning a car in a big city|a four-day work week|reading the news every day|giving children pocket money|"
    "living with roommates|online classes|public libraries|tipping in restaurants|adopting an older dog|paying with "
    "cash|homework in primary school|buying second-hand clothes|a gap year|cooking every day|camping without a phone|"
    "zoos|early retirement|open-plan offices|daylight saving time|growing your own vegetables"
)
MATTERS: Final = (
    "my landlord about a broken heater|a neighbour about loud music|my teacher about a late essay|a customer whose "
    "parcel got lost|my sister about her graduation|a colleague who is leaving|the city council about a dangerous "
    "crossing|a hotel about a forgotten jacket|my football team about the next match|an old friend I have not seen for "
    "years|a company about a summer internship|my doctor about moving an appointment|a library about a lost book|the "
    "parents of my class about a school trip|my boss about a better chair|a restaurant about a reservation for twelve|"
    "a museum about a group visit|my aunt about the sweater she knitted|the train company about a refund|new members "
    "of our book club"
)
JOBS: Final = (
    "a nurse|a junior programmer|a gardener|a bus driver|a museum guide|a pastry chef|an electrician|a kindergarten "
    "teacher|a translator|a lifeguard|a librarian|a carpenter|a sound engineer|a farmer|a fitness coach|a receptionist|"
    "a mechanic|a florist|a data analyst|a flight attendant"
)
THINGS: Final = (
    "penguins|the city of Lisbon|the Great Wall of China|origami|the planet Saturn|honeybees|the Olympic Games|"
    "volcanoes|the piano|chocolate|the Amazon river|dolphins|the invention of paper|the Sahara desert|mushrooms|the "
    "game of chess|lighthouses|the human hand|bamboo|the Vikings|kites|the moon landing|octopuses|windmills|the "
    "northern lights|the history of bread|camels|the Eiffel Tower|hummingbirds|coral reefs"
)
QUESTIONS: Final = (
    "Is it a good idea to drink coffee late in the evening|Can a beginner run ten kilometres after two months|Should I "
    "tell a friend that I broke her cup|Is a tomato a fruit|Can plants grow without sunlight|Is Pluto a planet|Should "
    "children have a phone at the age of eight|Will it rain in London this week|Is it safe to eat raw potatoes|Can "
    "you learn to sing as an adult|Should I sell my car if I work from home|Is the number 51 prime|Do fish sleep|Is "
    "Australia larger than Brazil|Can I bake a cake without eggs|Should I water a cactus every day|Is blue whale the "
    "largest animal on Earth|Can a person hear sounds in space|Is it rude to leave a party early|Do all birds fly"
)

FORMS: Final[tuple[tuple[str, str], ...]] = (
    (CHORES, "How do I {}?"),
    (CHORES, "I would like to {}. What should I do?"),
    (CHORES, "Give me advice on how to {}."),
    (CHORES, "hey, whats the best way to {}"),
    (CHORES, "Write a short guide for somebody who wants to {}."),
    (CONCEPTS, "Explain {} to a ten-year-old."),
    (CONCEPTS, "Could you explain {} in simple words?"),
    (CONCEPTS, "I have to give a talk on {}. Write the introduction."),
    (CONCEPTS, "Write a paragraph on {} for a school magazine."),
    (SUBJECTS, "Write a short poem about {}."),
    (SUBJECTS, "Tell me a story about {}."),
    (SUBJECTS, "Write the opening of a novel about {}."),
    (SUBJECTS, "Write a diary entry about {}."),
    (SUBJECTS, "Write a funny post for social media about {}."),
    (SUBJECTS, "Write a song about {}."),
    (PRODUCTS, "Write an advertisement for {}."),
    (PRODUCTS, "Describe {} for an online shop."),
    (PRODUCTS, "Write a review of {} that a happy customer could have written."),
    (PRODUCTS, "Come up with a name and a slogan for {}, and explain your choice."),
    (PAIRS, "What is the difference between {}?"),
    (PAIRS, "Compare {}."),
    (CHOICES, "What are the advantages and disadvantages of {}?"),
    (CHOICES, "Write a blog post about {}."),
    (CHOICES, "A friend asks me what I think of {}. What could I say?"),
    (MATTERS, "Write an email to {}."),
    (MATTERS, "Help me write a polite letter to {}."),
    (MATTERS, "Draft a message to {}."),
    (JOBS, "Write a cover letter for {}."),
    (JOBS, "What does a normal day of {} look like?"),
    (JOBS, "Write a job advertisement that looks for {}."),
    (THINGS, "Tell me something interesting about {}."),
    (THINGS, "Write a summary of what you know about {}."),
    (THINGS, "Write a quiz with questions about {}."),
    (THINGS, "Why are people fascinated by {}?"),
)
"""Subjects, and a request about one of them."""


@dataclass(frozen=True, slots=True)
class Request:
    text: str
    subject: str
    is_question: bool = False
    """Whether it can be answered by yes, no or maybe."""


def requests(part: Part) -> list[Request]:
    """All requests for training, or all that are held out.

    >>> len(requests("train")), len(requests("heldout"))
    (852, 213)
    >>> {request.subject for request in requests("train")} & {request.subject for request in requests("heldout")}
    set()
    """
    return [Request(form.format(subject), subject) for subjects, form in FORMS for subject in of_part(subjects, part)]


def questions(part: Part) -> list[Request]:
    """Questions that can be answered by yes, no or maybe."""
    return [Request(f"{text}?", text, is_question=True) for text in of_part(QUESTIONS, part)]


def of_part(listed: str, part: Part) -> Sequence[str]:
    return list(_of_part(listed.split("|"), part))


def _of_part(values: Sequence[str], part: Part) -> Iterator[str]:
    for place, value in enumerate(values):
        if (place % _EVERY == _EVERY - 1) == (part == "heldout"):
            yield value
