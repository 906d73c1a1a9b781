"""A reward that looks its facts up: the passage nearest to the question, from a vector store inside the worker.

The store is LanceDB, in the worker's scratch folder; the vectors are hashed letter trigrams, so no model is needed. Put
your passages and your embedding in their place.
"""

import math
import re
import tempfile
import zlib

import lancedb

FACTS = {
    "hydrogen": "H",
    "helium": "He",
    "lithium": "Li",
    "carbon": "C",
    "nitrogen": "N",
    "oxygen": "O",
    "sodium": "Na",
    "magnesium": "Mg",
    "aluminium": "Al",
    "silicon": "Si",
    "phosphorus": "P",
    "sulfur": "S",
    "chlorine": "Cl",
    "potassium": "K",
    "calcium": "Ca",
    "titanium": "Ti",
    "chromium": "Cr",
    "iron": "Fe",
    "nickel": "Ni",
    "copper": "Cu",
    "zinc": "Zn",
    "silver": "Ag",
    "tin": "Sn",
    "iodine": "I",
    "tungsten": "W",
    "platinum": "Pt",
    "gold": "Au",
    "mercury": "Hg",
    "lead": "Pb",
    "uranium": "U",
}
SIZE = 256


def embed(text):
    """A unit vector: how often each letter trigram occurs, hashed to SIZE places."""
    vector = [0.0] * SIZE
    padded = f"  {text.lower()}  "
    for start in range(len(padded) - 2):
        vector[zlib.crc32(padded[start : start + 3].encode()) % SIZE] += 1.0
    norm = math.sqrt(sum(value * value for value in vector))
    return [value / norm for value in vector]


def open_store():
    """One table with a passage for each fact. Made once in each worker, when the file is imported."""
    passages = [(f"The symbol of the element {name} is {symbol}.", symbol) for name, symbol in FACTS.items()]
    rows = [{"text": text, "symbol": symbol, "vector": embed(text)} for text, symbol in passages]
    return lancedb.connect(tempfile.mkdtemp()).create_table("facts", rows)


STORE = open_store()


def reward(prompts, completions, **columns):
    """In TRL's signature, since that is given the question. 1.0 where the completion says the symbol of the passage
    that was found for the question, as a word of its own."""
    return [
        score(text_of(prompt), text_of(completion)) for prompt, completion in zip(prompts, completions, strict=True)
    ]


def score(question, completion):
    """One sample."""
    [passage] = STORE.search(embed(question)).limit(1).to_list()
    return float(bool(re.search(rf"\b{re.escape(passage['symbol'])}\b", completion)))


def text_of(turns):
    """A conversation comes as its turns: the last one's text."""
    return turns if isinstance(turns, str) else turns[-1]["content"]
