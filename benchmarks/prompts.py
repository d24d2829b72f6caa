"""Prompts for rollouts with real weights: problems to solve and programs to explain, the same at
each call."""

PROBLEMS = (
    "A tank holds {a} litres. One pipe fills it in {b} hours, another empties it in {c} hours. Both"
    " are open and the tank starts empty. When is it full?",
    "How many whole numbers from 1 to {a} can be divided by {b} or by {c}, but not by both?",
    "A train leaves at noon with {a} km/h. {b} hours later a second one follows with {c} km/h more"
    " than the first. After how many hours of its own has the second one caught up?",
    "A box has {b} red and {c} blue balls. Three are drawn without putting any back. What is the"
    " probability that they do not all have the same colour?",
    "The first number of a sequence is {b}. Each later one is twice the one before, minus {c}. What"
    " is the tenth number, and is there a formula for the n-th?",
    "A rectangle is {b} cm longer than it is wide, and its area is {a} square centimetres. What is"
    " its circumference? Give the exact value and one with two decimals.",
)
NUMBERS = ({"a": 840, "b": 6, "c": 9}, {"a": 1260, "b": 4, "c": 7})
SOLVE = "Solve the problem step by step, check the result in a second way, then state the answer."

PROGRAMS = (
    """def merge(spans):
    merged = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return merged""",
    """def paths(graph, start, goal, seen=()):
    if start == goal:
        yield (*seen, goal)
    for node in graph.get(start, ()):
        if node not in seen and node != start:
            yield from paths(graph, node, goal, (*seen, start))""",
    """class Cache:
    def __init__(self, size):
        self.size, self.items = size, {}

    def get(self, key, make):
        value = self.items.pop(key) if key in self.items else make(key)
        self.items[key] = value
        if len(self.items) > self.size:
            del self.items[next(iter(self.items))]
        return value""",
    """def change(coins, total):
    ways = [1] + [0] * total
    for coin in coins:
        for value in range(coin, total + 1):
            ways[value] += ways[value - coin]
    return ways[total]""",
    """def words(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))""",
    """def rotate(matrix, turns):
    for _ in range(turns % 4):
        matrix = [list(row) for row in zip(*matrix[::-1])]
    return matrix""",
)
TASKS = (
    "Explain the program line by line to a beginner, with an example of a call and its result.",
    "Rewrite the program with type hints, docstrings and checks of its arguments, then write unit"
    " tests for it and explain what each test checks.",
)


def prompt_messages() -> list[list[dict[str, str]]]:
    """24 chats of one message; problems and programs take turns."""
    solve = [f"{SOLVE}\n\n{text.format(**numbers)}" for numbers in NUMBERS for text in PROBLEMS]
    explain = [f"{task}\n\n```python\n{code}\n```" for task in TASKS for code in PROGRAMS]
    turns = [text for pair in zip(solve, explain, strict=True) for text in pair]
    return [[{"role": "user", "content": text}] for text in turns]
