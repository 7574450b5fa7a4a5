"""A post without Flower: nodes answer in this process, and a test may spoil what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.answers import answer
from fedbayes.flower.kept import Kept, in_file
from fedbayes.flower.node import Node
from fedbayes.flower.places import Who
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter

Spoil = Callable[[str, int, Letter, Answer], Answer | None]


def in_memory() -> Kept:
    block: list[bytes] = []
    return Kept(lambda: block[0] if block else None, lambda new: block.__setitem__(slice(None), [new]))


class InProcess:
    """Nodes numbered 100 + client; `spoil(kind, client, letter, answer)` changes an answer, or None swallows it."""

    pause = 0.01

    def __init__(self, experiment: Experiment, folder: Path | None = None, spoil: Spoil | None = None) -> None:
        self.experiment, self.folder = experiment, folder
        self.there = [100 + k for k in range(experiment.clients)]
        self.who: dict[int, Who] = {}
        self.made: dict[tuple[str, int], tuple[Node, Kept]] = {}
        self.spoil = spoil or (lambda kind, client, letter, answer: answer)
        self.asked: list[tuple[str, int, Letter]] = []
        self.inbox: dict[str, Answer] = {}

    def nodes(self) -> dict[int, Who]:
        return {node: self.who.get(node, Who(f"key of {node}")) for node in self.there}

    def push(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> dict[str, int]:
        ids = {}
        for node, letter in letters.items():
            self.asked.append((kind, node - 100, letter))
            ids[f"m{len(self.asked)}"] = node
            said = self._answer(kind, node, letter)
            answer = self.spoil(kind, node - 100, letter, said)
            if answer is not None:
                self.inbox[f"m{len(self.asked)}"] = answer
        return ids

    def _answer(self, kind: str, node: int, letter: Letter) -> Answer:
        key = letter.head["method"], node
        if key not in self.made:
            kept = in_file(self.folder / f"{node}") if self.folder else in_memory()
            self.made[key] = Node(self.experiment.only(key[0]), node - 100), kept
        made, kept = self.made[key]
        return answer(made, kind, letter, kept)

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        # The last sent answers first: no sum may depend on the order.
        return [(key, self.inbox.pop(key)) for key in reversed(list(ids)) if key in self.inbox]
