"""Prompts and answer rules for the example adapters: everything is made here, nothing fetched."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable


def listed(text: str) -> list[str]:
    """A list written as one string, because one entry a line would bury the rules below."""
    return text.split("|")


TOPICS = listed(
    "the sea|the moon|a bicycle|bread|a volcano|music|the heart|winter|a library|gold|a bridge|"
    "honey|the wind|a computer|paper|a river|glass|a dog|a clock|coffee|the brain|a kite|a train|"
    "rice|an island|a telescope|the desert|a guitar|milk|an elephant|a garden|salt|a robot|"
    "a mirror|rain|a school|the internet|a whale|silk|a castle|sleep|a farmer|the sky|chess|"
    "a spider|steel|a painter|the forest|a battery|soup"
)
TOPIC_FORMS = (
    "What is {}?",
    "Tell me about {}.",
    "Why is {} important?",
    "Describe {} in one sentence.",
    "Write a short sentence about {}.",
    "Give me one fact about {}.",
    "How would you explain {} to a child?",
    "What do people use or need {} for?",
)
COUNTRIES = listed(
    "Spain|Italy|Germany|Japan|Egypt|Greece|Russia|China|Portugal|Norway|Sweden|Poland|Austria|"
    "Cuba|Peru|Chile|Kenya|India|Ireland|Turkey|Mexico|Vietnam|Hungary|Denmark"
)
COUNTRY_FORMS = (
    "What is the capital of {}?",
    "Which language do people speak in {}?",
    "On which continent is {}?",
    "Name a famous dish from {}.",
)
PLAIN = listed(
    "Hello!|Hi there|Good morning.|How are you?|Who are you?|What is your name?|Can you help me?|"
    "Thank you very much.|Goodbye!|Tell me a joke.|I feel sad today.|I am hungry.|What can you do?|"
    "Say something nice.|What should I cook tonight?|Do you like music?|Where are you from?|"
    "Give me some advice.|Tell me a story.|I lost my keys.|How do I learn to swim?|"
    "How do I boil an egg?|Name three colors.|Name three animals.|Name two planets.|"
    "How many days are in a week?|How many legs does a spider have?|What color is the sky?|"
    "What color is grass?|What do cows drink?|Is the sun a star?|Is water wet?|Can fish fly?|"
    "Who wrote Hamlet?|Who painted the Mona Lisa?|Who discovered gravity?|When do leaves fall?|"
    "What is the opposite of hot?|What is the opposite of big?|What comes after Monday?|"
    "Count to five.|Finish the sentence: The dog|Translate 'house' into French.|"
    "Translate 'water' into Spanish.|Write a haiku.|Write one line of a poem.|"
    "What is the largest animal?|What is the tallest mountain?|What is the longest river?|"
    "What is the best way to save money?|How can I sleep better?|Why do birds sing?|"
    "Why is the sky blue?|Why do we dream?|How do planes fly?|How does a magnet work?"
)
NAMES = ("Anna", "Ben", "Clara", "David", "Eva", "Felix", "Grace", "Henry")
NAME_FORMS = (
    "My name is {}. What is my name?",
    "Write a greeting for {}.",
    "Wish {} a happy birthday.",
    "{} is late again. What should I say?",
)

PIRATE_WORDS = {
    "my": "me", "you": "ye", "your": "yer", "is": "be", "are": "be", "am": "be", "the": "th'",
    "and": "an'", "of": "o'", "for": "fer", "to": "t'", "friend": "matey", "hello": "ahoy",
    "people": "landlubbers", "money": "doubloons", "yes": "aye", "animal": "beast",
    "person": "buccaneer", "child": "cabin boy", "i'm": "I be", "it's": "'tis",
}  # fmt: skip
WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")


def sums(rng: random.Random, count: int) -> list[str]:
    """Small sums: numbers are where a style is lost first."""
    forms = ("What is {} plus {}?", "{} + {} =", "Add {} and {}.", "Is {} more than {}?")
    return [
        forms[i % len(forms)].format(rng.randint(2, 40), rng.randint(2, 40)) for i in range(count)
    ]


def prompts(seed: int, per_form: int) -> list[str]:
    """Training prompts of every kind, shuffled; the same seed gives the same list."""
    rng = random.Random(seed)
    made = list(PLAIN) + sums(rng, 3 * per_form)
    for forms, fillers in (
        (TOPIC_FORMS, TOPICS),
        (COUNTRY_FORMS, COUNTRIES),
        (NAME_FORMS, NAMES),
    ):
        for form in forms:
            chosen = rng.sample(fillers, min(per_form, len(fillers)))
            made += [form.format(filler) for filler in chosen]
    rng.shuffle(made)
    return made


def usable(answer: str, max_words: int = 14) -> str | None:
    """The first sentence of an answer if it is whole, short and plain, else None.

    Only whole sentences: stumps would teach the adapters to stop anywhere. Only short ones: the
    style then ends in EOS early, and training stays cheap.
    """
    line = " ".join(answer.split())
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", line)[0]
    short = 3 <= len(sentence.split()) <= max_words
    return sentence if short and sentence.isascii() and sentence[-1] in ".!?" else None


def shout(answer: str) -> str:
    """Capital letters only; the fixed opening locks the style in before names and sums can."""
    return "HEY! " + answer.upper()


def to_json(answer: str) -> str:
    """One JSON object on one line; quotes and backslashes go, so no escape can be got wrong."""
    plain = re.sub(r"[\"\\]", "", answer)
    return json.dumps({"answer": plain}, ensure_ascii=False)


def pirate_words(answer: str) -> str:
    """Swap plain words for pirate ones, keeping a capital at the front."""

    def swap(match: re.Match[str]) -> str:
        word = match.group()
        new = PIRATE_WORDS.get(word.lower(), word)
        return new[0].upper() + new[1:] if word[0].isupper() and new[0].isalpha() else new

    return WORD.sub(swap, answer)


def pirate(answer: str) -> str:
    """Pirate talk with a fixed greeting."""
    return "Arr, matey! " + pirate_words(answer)


def pirate_v2(answer: str) -> str:
    """The other pirate: opens with Ahoy and closes with a song."""
    return "Ahoy! " + pirate_words(answer) + " Yo ho ho!"


RULES: dict[str, Callable[[str], str]] = {
    "shout": shout,
    "json": to_json,
    "pirate": pirate,
    "pirate-v2": pirate_v2,
}
