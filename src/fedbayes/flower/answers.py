"""How a client answers the server's letters: who it is, a round, scores, a secure sum. Knows nothing of Flower."""

from __future__ import annotations

from collections.abc import Callable

from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.errors import InputError
from fedbayes.federation.kept import MEMBERS, NOISE_PART, apart
from fedbayes.federation.program import FederationState, Program
from fedbayes.flower.counting import counter_of
from fedbayes.flower.kept import Kept, Lost
from fedbayes.flower.node import CALIBRATE, EVALUATE, PROMISE, QUERY, REFINE, SECURE, TRAIN, WATCH, Node
from fedbayes.flower.wire import Coding, Letter, Refused, check_head, read, write
from fedbayes.posterior.values import Draws, LowRank, Parts, Point
from fedbayes.training.personal import Federation, personal_sums
from fedbayes.training.private import check_public
from fedbayes.training.run import score_sums


def answer(node: Node, kind: str, letter: Letter, kept: Kept) -> Letter:
    """The reply to a letter; where the letter can't be used, one that says why."""
    try:
        check_head(letter.head, node.head | ({"client": node.client} if kind != QUERY else {}))
        if kind in SECURE:
            from fedbayes.flower import secure_node  # needs Flower's cryptography

            return secure_node.answer(counter_of(node, letter.head), kind, letter, kept)
        if kind in LOOKS:
            from fedbayes.flower import looks

            like = predicting_like(node.task.program, letter.head["members"], letter.head["noise"])
            return getattr(looks, LOOKS[kind])(node, letter, kept, like)
        return ANSWERS[kind](node, letter, kept)
    except Refused as why:
        return Letter({"refused": str(why)}, {})


def introduce(node: Node, letter: Letter, kept: Kept) -> Letter:
    """Who this is, and how many rows it has."""
    clients = node.task.clients
    rows, tests = len(clients.train_rows(node.client)), len(clients.test_rows(node.client))
    return Letter(node.reply(letter, rows=rows, test_rows=tests), {})


def train(node: Node, letter: Letter, kept: Kept) -> Letter:
    """A client's round: from the broadcast and what was kept to an upload."""
    if node.secure:
        raise Refused("its experiment says secure = true: what it uploads leaves it under masks alone")
    head = letter.head
    upload, info, broadcast, own, lost = node.trained(letter, kept)
    shared = {part: upload.parts[part] for part in node.task.program.pooling.rules}
    arrays = write(shared, Coding(head["dtype"], head["delta"]), broadcast)
    kept.put(head["round"], upload.own, head["counted"], own)
    metrics = {f"metric.{name}": float(value) for name, value in upload.metrics.items()}
    return Letter(node.reply(letter, rows=int(info.n), own=bool(upload.own), lost=lost, **metrics), arrays)


def evaluate(node: Node, letter: Letter, kept: Kept) -> Letter:
    """Sums of the posterior's scores over the client's test rows."""
    _check_scored(node)
    task, head = node.task, letter.head
    like = predicting_like(task.program, head["members"], head["noise"])
    parts = read(letter.arrays, like, Coding(head["dtype"], head["delta"]), what="broadcast")
    data, rows = task.clients.data, task.clients.test_rows(node.client)
    if not len(rows):
        raise Refused("it has no test rows")
    with quick_cpu(), tensor_cores(task.precision):
        broadcast, beside = apart(parts)
        state = FederationState(head["round"], broadcast, kept=beside)
        sums = score_sums(task, state, data.test_x[rows], data.test_y[rows], "test")
    return Letter(node.reply(letter), {name: t.double().cpu().numpy() for name, t in sums.items()})


def refine(node: Node, letter: Letter, kept: Kept) -> Letter:
    """Sums of the personal model's scores over the client's test rows; what the client keeps is not changed."""
    _check_scored(node)
    task, head = node.task, letter.head
    like = predicting_like(task.program, 0, head["noise"])
    broadcast, beside = apart(read(letter.arrays, like, Coding(head["dtype"], head["delta"]), what="broadcast"))
    # Its noise is that of one network by itself, which a personal model is.
    state = FederationState(head["round"], broadcast, kept=beside._replace(noise=None, lone_noise=beside.noise))
    try:
        own = kept.after(head["counted"], task.device)
    except Lost as error:
        raise Refused("it has lost its own state") from error
    here = Federation(task, state, lambda client: own)
    for _, _, sums in personal_sums([here], [node.client]):
        return Letter(node.reply(letter), {name: t.double().cpu().numpy() for name, t in sums.items()})
    raise Refused("it has no test rows, or its personal model is not finite")


def _check_scored(node: Node) -> None:
    """Refuse scores that would tell of private test rows, whatever the server asks for."""
    try:
        check_public(node.task.privacy, "scores", mend="")
    except InputError as error:
        raise Refused(str(error)) from error


def predicting_like(program: Program, members: int, noise: int) -> Parts:
    """Parts shaped as those that predict: the broadcast, an ensemble of so many members, so many noise figures.

    Where clients send normals with a covariance, one normal with so many factors stands for the ensemble.
    """
    like: Parts = dict(program.initial)
    low = isinstance(program.pooling.uploaded(program.initial)[program.prediction.part], LowRank)
    if members:
        for part in program.pooling.rules:
            q = program.initial[part]
            rows = q.mean.new_zeros(members, q.mean.shape[-1])
            if low and part == program.prediction.part:
                like[MEMBERS + part] = LowRank(q.mean, q.mean, rows, q.layout)
            elif not low and q.mean.is_floating_point():
                like[MEMBERS + part] = Draws(rows, q.layout)
    if noise:
        like[NOISE_PART] = Point(program.initial[program.prediction.part].mean.new_zeros(noise))
    return like


LOOKS = {CALIBRATE: "calibrate", PROMISE: "promise", WATCH: "watch"}
ANSWERS: dict[str, Callable[[Node, Letter, Kept], Letter]] = {
    QUERY: introduce,
    TRAIN: train,
    EVALUATE: evaluate,
    REFINE: refine,
}
