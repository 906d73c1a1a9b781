"""A reward that looks its facts up: the passage nearest to the question, from a vector store inside the worker.

The store is LanceDB, in the worker's scratch folder; the vectors are hashed letter trigrams, so no model is needed.
Replace the passages and the embedding with yours.
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
    """Return a unit vector: the counts of letter trigrams, hashed to SIZE elements."""
    vector = [0.0] * SIZE
    padded = f"  {text.lower()}  "
    for start in range(len(padded) - 2):
        vector[zlib.crc32(padded[start : start + 3].encode()) % SIZE] += 1.0
    norm = math.sqrt(sum(value * value for value in vector))
    return [value / norm for value in vector]


def open_store():
    """One table with a passage for each fact. Created once per worker, when the file is imported."""
    passages = [(f"The symbol of the element {name} is {symbol}.", symbol) for name, symbol in FACTS.items()]
    rows = [{"text": text, "symbol": symbol, "vector": embed(text)} for text, symbol in passages]
    return lancedb.connect(tempfile.mkdtemp()).create_table("facts", rows)


STORE = open_store()


def reward(prompts, completions, **columns):
    """1.0 if the completion has the symbol of the nearest passage, as a separate word. TRL's signature has prompts."""
    return [
        score(text_of(prompt), text_of(completion)) for prompt, completion in zip(prompts, completions, strict=True)
    ]


def score(question, completion):
    """One sample."""
    [passage] = STORE.search(embed(question)).limit(1).to_list()
    return float(bool(re.search(rf"\b{re.escape(passage['symbol'])}\b", completion)))


def text_of(turns):
    """Return the text of the last message of a conversation."""
    return turns if isinstance(turns, str) else turns[-1]["content"]
