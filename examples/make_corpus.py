"""Writes corpus.txt: an invented harbour chronicle, the same bytes on every run.

    python examples/make_corpus.py > examples/corpus.txt

The text has structure at several distances: spelling and grammar, days that follow one another,
people who keep their trade and their ship, and stock that is added and taken away correctly.
"""

import random
import sys

SIZE = 300_000  # characters, at least
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    ("January", 31),
    ("February", 28),
    ("March", 31),
    ("April", 30),
    ("May", 31),
    ("June", 30),
    ("July", 31),
    ("August", 31),
    ("September", 30),
    ("October", 31),
    ("November", 30),
    ("December", 31),
)
PEOPLE = {
    "Agnes": ("the harbour master", "she"),
    "Bertram": ("the rope maker", "he"),
    "Clemence": ("the pilot", "she"),
    "Dunstan": ("the miller", "he"),
    "Edith": ("the chandler", "she"),
    "Fergus": ("the smith", "he"),
    "Griselda": ("the baker", "she"),
    "Hamish": ("the lamp keeper", "he"),
    "Isolde": ("the clerk", "she"),
    "Jasper": ("the cooper", "he"),
}
SHIPS = {
    "the Grey Heron": ("salt", "Norhaven"),
    "the Patient Anne": ("timber", "Lindmouth"),
    "the Silver Eel": ("herring", "the outer islands"),
    "the Second Chance": ("wool", "Castlewick"),
    "the Old Promise": ("barley", "Underhill"),
    "the Northern Lass": ("tar", "Kelmsund"),
}
WEATHER = {
    "fair": ("a light wind from the west", "a calm sea", "a clear sky until evening"),
    "foul": ("rain before noon", "a heavy swell at the bar", "a gale out of the north"),
    "grey": ("low cloud over the hills", "a thin mist on the water", "no wind to speak of"),
}
CHANGES = {"fair": ("fair", "fair", "grey"), "grey": ("fair", "grey", "foul")}
CHANGES["foul"] = ("foul", "grey", "grey")
TASKS = (
    "mended the nets that the storm had torn",
    "painted the door of the storehouse blue",
    "counted the barrels twice and found none missing",
    "carried the letters up the hill to the mill",
    "told the children how the old lighthouse was built",
    "borrowed a saw and returned it before supper",
    "sat by the window and wrote a long letter home",
    "walked to the end of the pier and back again",
)
SAYINGS = (
    "A full hold makes a slow ship.",
    "The tide does not wait for the clerk.",
    "Count twice, and load once.",
    "Who shares a lamp has twice the light.",
    "A short rope is long enough for a short well.",
)
THOUGHTS = (
    "{name} said that the winter would be long, and nobody argued.",
    "{name} thought that the new crane was worth every penny that it had cost.",
    "When {name} came home, the fire was out but the kettle was still warm.",
    "{name} asked for a larger boat, as {pronoun} did every year, and was told to wait.",
    "If the wind holds, wrote {name}, we shall have the harbour full before the week is over.",
)


def day_entry(rng: random.Random, date: str, weather: str, stock: dict[str, int]) -> str:
    """Return one day of the chronicle and bring the stock up to date."""
    lines = [f"{date}. {weather.capitalize()} weather, {rng.choice(WEATHER[weather])}."]
    if weather == "foul":
        lines.append("No ship crossed the bar.")
    else:
        for ship in rng.sample(sorted(SHIPS), rng.randint(1, 2)):
            lines.append(call_of_ship(rng, ship, stock))
    name = rng.choice(sorted(PEOPLE))
    trade, pronoun = PEOPLE[name]
    lines.append(f"{name}, {trade}, {rng.choice(TASKS)}.")
    if rng.random() < 0.5:
        lines.append(rng.choice(THOUGHTS).format(name=name, pronoun=pronoun))
    if rng.random() < 0.2:
        lines.append(f'"{rng.choice(SAYINGS)}"')
    return " ".join(lines)


def call_of_ship(rng: random.Random, ship: str, stock: dict[str, int]) -> str:
    """Let one ship load or unload its cargo."""
    cargo, port = SHIPS[ship]
    before, amount = stock[cargo], rng.randint(2, 30)
    if before > 60 or (before > amount and rng.random() < 0.4):
        amount = min(amount, before)
        stock[cargo] = before - amount
        done = f"loaded {amount} casks of {cargo} for {port}"
    else:
        stock[cargo] = before + amount
        done = f"came in from {port} with {amount} casks of {cargo}"
    name = ship[0].upper() + ship[1:]
    return f"{name} {done}; of {before} there are now {stock[cargo]}."


def stock_list(stock: dict[str, int]) -> str:
    """Return the month's stock as a small table with its sum."""
    rows = [f"  {cargo:<8}{count:>4}" for cargo, count in sorted(stock.items())]
    return "\n".join(
        ["Stock at the end of the month:", *rows, f"  in all  {sum(stock.values()):>4}"]
    )


def chronicle(seed: int = 1) -> str:
    """Return the whole text."""
    rng = random.Random(seed)
    stock = {cargo: rng.randint(10, 40) for cargo, _ in SHIPS.values()}
    parts, size, year, weekday, weather = [], 0, 1801, 0, "fair"
    while size < SIZE:
        parts.append(f"THE YEAR {year}\n")
        for month, length in MONTHS:
            for day in range(1, length + 1):
                weather = rng.choice(CHANGES[weather])
                date = f"{DAYS[weekday]}, {day} {month} {year}"
                parts.append(day_entry(rng, date, weather, stock))
                weekday = (weekday + 1) % 7
            parts.append("\n" + stock_list(stock) + "\n")
        year += 1
        size = sum(map(len, parts))
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(chronicle())
