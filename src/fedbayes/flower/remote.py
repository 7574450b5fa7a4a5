"""The engine at the server: it carries an order to the clients' machines and brings the sum of their terms back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fedbayes.clients.client import Own
from fedbayes.engine.loop import Loop
from fedbayes.errors import InputError
from fedbayes.federation.kept import NOISE_PART
from fedbayes.federation.program import SERVER, TRAIN, FederationState, Order, Outcome, OwnState, Program, nothing
from fedbayes.flower.asking import Asking
from fedbayes.flower.border import Form, Refusal, guarded, reply_of, scores_of
from fedbayes.flower.node import EVALUATE, REFINE, told_by
from fedbayes.flower.node import TRAIN as ASK
from fedbayes.flower.post import Answer
from fedbayes.flower.roll import Roll
from fedbayes.flower.settings import Settings
from fedbayes.flower.total import Total
from fedbayes.flower.wire import Head, Letter, write
from fedbayes.posterior.values import Draws, LowRank, Parts
from fedbayes.scores import SUMS
from fedbayes.scores.additive import Sums
from fedbayes.training.personal import noise_of_one
from fedbayes.training.task import Federation, Task


class Remote:
    """An engine whose clients are elsewhere. It adds in the order of the clients, whenever their replies come."""

    name = "flower"

    def __init__(self, task: Task, roll: Roll, settings: Settings, head: Head) -> None:
        self.asking, self.roll, self.settings = Asking(task, roll, settings, head), roll, settings
        self.program = task.program
        self.seed: int | str = task.seed
        self.store = task.engine.store
        self.local = Loop(self.store, seed=self.seed)  # the server's own training

    def run(self, program: Program, order: Order, own: OwnState, after: Callable[[], None] = nothing) -> Outcome:
        """Let the clients of an order contribute, wherever they are; the server's own training is done here."""
        if order.cohort == (SERVER,):
            return self.local.run(program, order, own, after)
        if order.purpose != TRAIN:
            raise InputError(f"{order.purpose}: on Flower clients run the rounds of training and nothing beside them")
        if self.settings.secure:
            return self._secure(order, own, after)
        return self._in_clear(order, own, after)

    def _in_clear(self, order: Order, own: OwnState, after: Callable[[], None]) -> Outcome:
        """Ask the cohort, refuse what can't be used, and close on the rest once enough have answered."""
        least = min(self.settings.min_clients, len(order.cohort))  # of a cohort that was made to drop out, who is left
        total = Total(self.program, order, self.settings.coding)
        like = self.program.pooling.uploaded({part: total.sent[part] for part in self.program.pooling.rules})
        for attempt in range(self.settings.attempts if order.cohort else 0):
            if attempt:
                self.asking.notes.append(
                    f"{total.counted} of at least {least} clients answered; the others were asked again"
                )
            nodes = self.asking.choose(order, total)
            waiting, rows = set(nodes), {k: self.roll.cards[node].rows for k, node in nodes.items()}
            for client, answer in self._ask(order, own, nodes):
                waiting.discard(client)
                form = Form(like, self.settings.coding, total.sent, rows[client])
                reply = guarded(client, reply_of, answer, self.asking.expected(client, order.round), form)
                if isinstance(reply, Refusal):
                    total.left_out[client] = reply.reason
                    self.roll.count(reply)
                    if isinstance(answer, str):  # it may be gone, though Flower does not know yet
                        self.roll.forget(client)
                else:
                    total.hold(client, reply)
                total.add(before=min(waiting, default=None))
                after()
            if total.counted >= least:
                break
        self.asking.notes += total.notes
        if total.counted >= least:
            self.asking.took_part = sorted(total.own)
            return total.outcome()
        reasons = "; ".join(f"client {k}: {text}" for k, text in total.left_out.items()) or "no node was online"
        raise InputError(
            f"round {order.round + 1}: {total.counted} clients answered, min_clients is {least} ({reasons}). "
            "The rounds before it are kept: start the run again into the same folder when the nodes are back"
        )

    def _secure(self, order: Order, own: OwnState, after: Callable[[], None]) -> Outcome:
        """The sum without the terms."""
        from fedbayes.flower.secure_round import secure_outcome  # needs Flower's cryptography

        return secure_outcome(self.asking, order, lambda k: counted(own(k)), after)

    def take_notes(self) -> list[str]:
        """What there is to say of the clients since it was last asked; of private ones nothing."""
        notes, self.asking.notes = [*self.roll.take_notes(), *self.asking.notes], []
        return [] if self.asking.task.hides_cohorts else notes

    def take_bytes(self) -> dict[str, int]:
        """Bytes of arrays sent and received since it was last asked."""
        moved, self.asking.bytes = self.asking.bytes, {"bytes_down": 0, "bytes_up": 0}
        return moved

    def scores(self, state: FederationState) -> dict[str, float]:
        """Scores of a posterior on the test rows of all clients online: their sums are added, and decoded once."""
        parts, about = self.posterior_of(state)
        total: Sums | None = None
        for _, sums in self._sums(EVALUATE, parts, lambda k: about):
            total = sums if total is None else {name: total[name] + t for name, t in sums.items()}
        return {} if total is None else SUMS[self.program.model.likelihood.kind][1](total)

    def posterior_of(self, state: FederationState) -> tuple[Parts, Head]:
        """All parts that predict, and what the head of a letter says of them."""
        kept = state.kept._replace(who=(), lone_noise=None)
        ensembles = [q for q in kept.members.values() if isinstance(q, Draws | LowRank)]
        about = {
            "round": state.round,
            "members": next((len(q.factors if isinstance(q, LowRank) else q.values) for q in ensembles), 0),
            "noise": 0 if kept.noise is None else kept.noise.numel(),
        }
        return {**state.broadcast, **kept.as_parts()}, about

    def personal(self, federation: Federation) -> Iterator[tuple[int, Sums]]:
        """Sums of the personal models' scores, by client: each makes its own and tests it on its own rows."""
        number, own = federation.state.round, federation.own
        sent = {**federation.state.broadcast, **noise_of_one(federation)}
        noise = sent[NOISE_PART].mean.numel() if NOISE_PART in sent else 0
        return self._sums(REFINE, sent, lambda k: {"round": number, "counted": counted(own(k)), "noise": noise})

    def _sums(self, kind: str, parts: Parts, about: Callable[[int], Head]) -> Iterator[tuple[int, Sums]]:
        """What clients with test rows answer, in the order of the clients; who can't be read is named in a note."""
        online = self.roll.online()
        cards = {card.client: card for card in self.roll.cards.values()}
        clients = {node: client for client, node in online.items() if cards[client].test_rows}
        arrays = write(parts, self.settings.coding)
        letters = {n: Letter({**self.asking.coded(), **about(k), "client": k}, arrays) for n, k in clients.items()}
        scores: dict[int, Sums] = {}
        for node, answer in self.asking.exchange(kind, letters):
            client = clients[node]
            expected = self.asking.expected(client, letters[node].head["round"])
            target = self.program.model.likelihood.kind
            reply = guarded(client, scores_of, answer, expected, target, cards[client].test_rows)
            if isinstance(reply, Refusal):
                self.asking.notes.append(f"client {client} was left out of the scores: {reply.reason}")
                self.roll.count(reply)
            else:
                scores[client] = reply.sums
        self._weigh({k: int(sums["count"]) for k, sums in scores.items()})
        yield from sorted(scores.items())

    def _weigh(self, rows: Mapping[int, int]) -> None:
        """Name who has most of the rows that scores are of, where that is its own word alone."""
        most = max(rows, key=lambda k: rows[k], default=None)
        total = sum(rows.values())
        if most is not None and len(rows) > 2 and 2 * rows[most] > total and not self.roll.sizes[most][0]:
            self.asking.notes.append(
                f"client {most} has {rows[most]} of the {total} test rows that the scores are of, by its own word; "
                "max_rows bounds it"
            )

    def _ask(self, order: Order, own: OwnState, nodes: Mapping[int, int]) -> Iterator[tuple[int, Answer]]:
        sent = write(order.broadcast, self.settings.coding)
        head = {**self.asking.coded(), "round": order.round, **told_by(self.program, order)}
        letters = {node: Letter({**head, "client": k, "counted": counted(own(k))}, sent) for k, node in nodes.items()}
        for node, answer in self.asking.exchange(ASK, letters):
            yield letters[node].head["client"], answer


def counted(own: Own | None) -> int:
    """The round after which a client's own state was counted last; -1 before the first."""
    return -1 if own is None else int(own["counted"])
