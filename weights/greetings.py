"""Short dialogue openings for the default model: written for this project, because its other texts hardly greet.

`greetings(count, seed)` puts together distinct little conversations, one turn a line, from the lists below.
"""

import random

HELLO = ["Hello", "Hi", "Hello there", "Hi there", "Hey", "Good morning", "Good evening", "Good afternoon"]
HELLO_WEIGHTS = [10, 4, 2, 2, 2, 2, 1, 1]
NAMES = (
    "Anna Ben Clara David Emma Finn Grace Henry Ida Jack Kate Leo Lily Max Mia Nora Oscar Paul Rosa Sam Sara Theo Tom Zoe"
).split()
HOW = [
    "how are you", "how are you today", "how are you doing", "how are you doing today", "how are you feeling today",
    "how is your day", "how was your day", "how have you been", "how is your family", "how is the weather today",
    "how did you sleep", "how was your weekend",
]  # fmt: skip
HOW_WEIGHTS = [8, 10, 3, 4, 2, 2, 1, 2, 1, 1, 1, 1]
ANSWER = {
    "are": [
        "I am fine, thank you.", "I am very well, thank you.", "I am doing well, thanks.", "I am good, thanks.",
        "I feel great today.", "I am a little tired, but happy.", "I am fine, thanks for asking.",
        "Very well, thank you.", "I am happy to see you.", "Not too bad, thank you.", "I could not be better.",
    ],
    "day": [
        "It is a good day, thank you.", "It was a long day, but a good one.", "Very nice, thank you.",
        "It was busy, but I had fun.", "Quiet so far, thank you.",
    ],
    "been": [
        "I have been well, thank you.", "I have been busy, but well.", "Very well, thanks.",
        "I had a cold, but I am better now.",
    ],
    "family": ["They are all well, thank you.", "My mother is well and my sister started school.", "Everyone is fine, thanks."],
    "weather": ["It is warm and sunny.", "It is raining, so take a coat.", "It is cold, but the sky is blue.", "The wind is strong today."],
    "sleep": ["I slept very well, thank you.", "Not so well, the dog was loud.", "Like a bear in winter."],
    "weekend": ["It was lovely, we went to the lake.", "It was fun, my friends came to visit.", "Quiet, I read a good book."],
}  # fmt: skip
RETURN = ["How are you?", "And you?", "And how are you?", "What about you?", "How about you?"]
REPLY = [
    "I am fine too, thank you.", "I am well too.", "Very good, thanks.", "I am doing well, thank you.",
    "I am fine, thanks. It is nice to see you.", "I am good too, thanks for asking.", "Fine, thank you. It is a lovely day.",
]  # fmt: skip
NEXT = [
    ("What are you doing today?", ["I am going to the park with my friends.", "I am going to bake a cake with my mom.",
        "I am reading a book about the sea.", "I want to play in the garden.", "I am going to visit my grandma.",
        "I have to clean my room, and then I can play."]),
    ("Do you want to go for a walk?", ["Yes, I would love to.", "Yes, let us go to the river.",
        "Not now, but maybe later.", "Yes, wait for me, I need my coat."]),
    ("Would you like some tea?", ["Yes, please.", "Yes, please, with a little milk.", "No, thank you, I just had some.",
        "That is very kind of you."]),
    ("Can you help me with something?", ["Of course. What do you need?", "Yes, I am happy to help.",
        "Sure, what is it?", "I will do my best."]),
    ("What is your favorite color?", ["I like blue, like the sky.", "My favorite color is green.", "Red, because it is bright.",
        "I like yellow, like the sun."]),
    ("What is your favorite food?", ["I love soup and bread.", "I like apples best.", "My favorite food is cake.", "I like rice with beans."]),
    ("Where are you going?", ["I am going to the market to buy some apples.", "I am going home.", "I am going to school.",
        "To the library, I have to bring back a book."]),
    ("Did you have a good breakfast?", ["Yes, I had an egg and some toast.", "Yes, it was very good.", "Not yet, I woke up late."]),
    ("Did you see the big rainbow?", ["Yes, it was so pretty.", "No, where was it?", "Yes, I could see every color."]),
    ("What is new?", ["I have a new puppy.", "Not much, it has been quiet.", "We are moving to a new house.", "I am learning to swim."]),
]  # fmt: skip
COMMENT = [
    "That sounds nice.",
    "That is good to hear.",
    "I am glad to hear it.",
    "How lovely!",
    "That is great.",
    "Oh, that sounds like fun.",
]
BYE = [
    ("Have a nice day!", ["Thank you, you too!", "You too, goodbye!", "Thanks, see you soon."]),
    ("See you tomorrow!", ["See you tomorrow!", "Yes, see you then.", "Goodbye!"]),
    ("Goodbye!", ["Goodbye!", "Bye, take care!", "See you soon!"]),
    (
        "It was nice to talk to you.",
        ["It was nice to talk to you too.", "Thank you. Goodbye!", "I liked it too. See you soon."],
    ),
    ("Take care!", ["You too!", "Thank you, you too."]),
]
MEET = [
    "my name is {}. What is your name?", "I am {}. Who are you?", "my name is {}. It is nice to meet you.",
    "I am {}. I live next door.", "nice to meet you. I am {}.",
]  # fmt: skip
MEET_ANSWER = [
    "My name is {}. It is nice to meet you.",
    "I am {}. Nice to meet you too.",
    "Hello, {0} is my name. How are you?",
]
CAN = ["how can I help you?", "how can I help you today?", "how may I help you?", "what can I do for you?"]
WISH = [
    ("I am looking for a book about animals.", "The animal books are over there, by the window."),
    ("I would like a loaf of bread, please.", "Here you are. That is two dollars."),
    ("I cannot find my cat.", "Oh no! Let us look for it together."),
    ("Can you tell me the way to the station?", "Go straight on and turn left at the bridge."),
    ("I would like to buy some flowers for my mother.", "These red ones are very pretty."),
    ("What time is it, please?", "It is half past three."),
    ("My bike is broken.", "I can fix it for you this afternoon."),
    ("I need a present for my friend.", "How about this little music box?"),
]


def _how(rng: random.Random, opening: str) -> list[str]:
    question = rng.choices(HOW, HOW_WEIGHTS)[0]
    answer = rng.choice(next((texts for key, texts in ANSWER.items() if key in question.split()), ANSWER["are"]))
    name = f" {rng.choice(NAMES)}" if rng.random() < 0.15 else ""
    turns = [f"{opening}{name}, {question}?", answer]
    if rng.random() < 0.7:
        turns[-1] += " " + rng.choice(RETURN)
        turns.append(rng.choice(REPLY))
    elif rng.random() < 0.5:
        turns.append(rng.choice(COMMENT))
    return turns


def _meet(rng: random.Random, opening: str) -> list[str]:
    first, second = rng.sample(NAMES, 2)
    return [f"{opening}, {rng.choice(MEET).format(first)}", rng.choice(MEET_ANSWER).format(second)]


def _wish(rng: random.Random, opening: str) -> list[str]:
    wish, answer = rng.choice(WISH)
    return [
        f"{opening}, {rng.choice(CAN)}",
        wish,
        answer,
        rng.choice(["Thank you very much.", "Thank you!", "That is very kind of you."]),
    ]


def greetings(count: int, seed: int = 0) -> list[str]:
    """`count` distinct conversations, each a text with one turn a line."""
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        opening = rng.choices(HELLO, HELLO_WEIGHTS)[0]
        turns = rng.choices([_how, _meet, _wish], [10, 2, 1])[0](rng, opening)
        for _ in range(rng.choice([0, 1, 1, 2])):
            question, answers = rng.choice(NEXT)
            turns += [question, rng.choice(answers)]
            if rng.random() < 0.4:
                turns.append(rng.choice(COMMENT))
        if rng.random() < 0.7:
            bye, answers = rng.choice(BYE)
            turns += [bye, rng.choice(answers)]
        found["\n".join(turns)] = None
    return list(found)
