"""The ways of dealing rows to clients: labels in, (rows client after client, rows per client) out."""

import numpy as np

Generator = np.random.Generator
Dealt = tuple[np.ndarray, np.ndarray]


def iid(labels: np.ndarray, clients: int, rng: Generator, *, volume: int | None) -> Dealt:
    n = len(labels)
    if volume is None:
        sizes = np.full(clients, n // clients)
        sizes[: n % clients] += 1
    else:
        sizes = np.full(clients, volume)
    if sizes.sum() > n:
        raise ValueError(
            f"volume {volume} for {clients} clients needs {sizes.sum()} rows, there are {n}: lower volume or clients"
        )
    return rng.permutation(n)[: sizes.sum()], sizes


def natural(owners: np.ndarray, clients: int, rng: Generator, *, owners_each: int, some: bool) -> Dealt:
    ids = np.unique(owners)
    if clients * owners_each > len(ids):
        raise ValueError(
            f"{clients} clients of {owners_each} owners each are more than the {len(ids)} there are: lower clients"
        )
    if clients * owners_each < len(ids) and not some:
        raise ValueError(
            f"natural: {clients} clients of {owners_each} owners each leave out {len(ids) - clients * owners_each} of "
            f"the {len(ids)} owners: set clients={len(ids)}, raise owners_each, or draw some of them by some=True"
        )
    # All owners keep their order; a part of them is drawn.
    chosen = ids if clients * owners_each == len(ids) else rng.permutation(ids)[: clients * owners_each]
    client_of = np.full(ids.max() + 1, -1)
    client_of[chosen] = np.arange(len(chosen)) // owners_each
    home = client_of[owners]
    rows = np.flatnonzero(home >= 0)
    return rows[np.argsort(home[rows], kind="stable")], np.bincount(home[rows], minlength=clients)


def dirichlet(labels: np.ndarray, clients: int, rng: Generator, *, alpha: float, least: int) -> Dealt:
    kinds, volume = np.unique(labels, return_counts=True)
    if clients * least > len(labels):
        raise ValueError(
            f"{clients} clients of at least {least} rows need {clients * least}, there are {len(labels)}: lower clients"
        )
    shares = _dirichlets(np.full((len(kinds), clients), alpha), rng)
    cuts = np.rint(np.cumsum(shares, axis=1) * volume[:, None])
    cuts[:, -1] = volume
    counts = np.diff(cuts, axis=1, prepend=0).astype(np.int64).T
    _top_up(counts, least)
    return by_counts(labels, counts, rng)


def dirichlet_equal(labels: np.ndarray, clients: int, rng: Generator, *, alpha: float, volume: int | None) -> Dealt:
    kinds, left = np.unique(labels, return_counts=True)
    each = _volume(len(labels), clients, volume)
    mix = _dirichlets(np.full((clients, len(kinds)), alpha), rng)
    counts = np.zeros((clients, len(kinds)), np.int64)
    for k in rng.permutation(clients):  # Late clients meet empty classes: a random order spreads that.
        want = each
        while want:
            weight = np.where(left > counts[k], mix[k] + 1e-12, 0.0)
            ask = np.minimum(counts[k] + apportion(weight / weight.sum(), want, rng), left)
            want -= int((ask - counts[k]).sum())
            counts[k] = ask
        left = left - counts[k]
    return by_counts(labels, counts, rng)


def dirichlet_own(
    labels: np.ndarray, clients: int, rng: Generator, *, low: float, high: float, volume: int | None
) -> Dealt:
    kinds = np.unique(labels)
    each = _volume(len(labels), clients, volume, reuse=True)
    grid = low + (high - low) * np.arange(1, clients + 1) / clients
    mix = _dirichlets(np.repeat(grid[:, None], len(kinds), axis=1), rng)
    return by_counts(labels, apportion(mix, each, rng), rng, reuse=True)


def labels_per_client(labels: np.ndarray, clients: int, rng: Generator, *, k: int, volume: int | None) -> Dealt:
    kinds, count = np.unique(labels, return_counts=True)
    if k > len(kinds):
        raise ValueError(f"k = {k} labels per client, but there are {len(kinds)}: lower k")
    if volume is None:
        _volume(len(labels), clients, None)
    holds = _assign(_slots(count, clients, k, rng), clients, k, rng)
    if volume is not None:
        counts = np.zeros((clients, len(kinds)), np.int64)
        counts[np.nonzero(holds)] = apportion(np.full((clients, k), 1 / k), volume, rng).ravel()
        return by_counts(labels, counts, rng)
    # All rows of a class are cut evenly among those who hold it.
    holders = np.maximum(holds.sum(0), 1)
    rank = np.cumsum(holds, axis=0) - 1
    counts = holds * (count // holders + (rank < count % holders))
    return by_counts(labels, counts, rng)


def shards(labels: np.ndarray, clients: int, rng: Generator, *, per_client: int, volume: int | None) -> Dealt:
    pieces = clients * per_client
    rows = rng.permutation(len(labels))
    if volume is not None:
        rows = rows[: clients * _volume(len(labels), clients, volume)]
    if len(rows) < pieces:
        raise ValueError(f"{pieces} shards need as many rows, there are {len(rows)}: lower clients or per_client")
    rows = rows[np.argsort(labels[rows], kind="stable")]
    cuts = np.linspace(0, len(rows), pieces + 1).astype(np.int64)
    main = labels[rows[(cuts[:-1] + cuts[1:]) // 2]]
    kinds, kind_of = np.unique(main, return_inverse=True)
    slots = np.bincount(kind_of)
    if slots.max() > clients:
        raise ValueError(
            f"class {kinds[slots.argmax()]} fills {slots.max()} of {pieces} shards, so {clients} clients cannot each "
            f"have shards of {per_client} different classes: lower per_client or use labels_per_client"
        )
    holds = _assign(slots, clients, per_client, rng)
    # Shards are in class order: hand them to the holders of their class, class after class, then sort by client.
    client_of = np.concatenate([rng.permutation(np.flatnonzero(holds[:, c])) for c in range(len(kinds))])
    home = np.repeat(client_of, np.diff(cuts))
    return rows[np.argsort(home, kind="stable")], np.bincount(home, minlength=clients)


def main_classes(labels: np.ndarray, clients: int, rng: Generator, *, main: int, p: float, volume: int | None) -> Dealt:
    kinds, count = np.unique(labels, return_counts=True)
    if main > len(kinds):
        raise ValueError(f"main = {main} classes per client, but there are {len(kinds)}: lower main")
    holds = _assign(_slots(np.ones(len(kinds), np.int64), clients, main, rng), clients, main, rng)
    mix = p / len(kinds) + (1 - p) / main * holds
    if volume is not None:
        return by_counts(labels, apportion(mix, volume, rng), rng)
    demand = mix.sum(0)
    each = int(np.min(count[demand > 0] / demand[demand > 0]) + 1e-9)
    counts = apportion(mix, each, rng)
    while each > 0 and (counts.sum(0) > count).any():  # Rounding may ask for a row more than there is.
        each -= 1
        counts = apportion(mix, each, rng)
    return by_counts(labels, counts, rng)


def by_counts(labels: np.ndarray, counts: np.ndarray, rng: Generator, *, reuse: bool = False) -> Dealt:
    """Give client k `counts[k, c]` rows of the c-th class present, in random order.

    The clients take windows, one after the other, of each class in one shuffled order. With reuse the order is a ring:
    rows come again only when a class has run out, and within one client only when it asks for more than there are.
    """
    kinds, kind_of, have = np.unique(labels, return_inverse=True, return_counts=True)
    need = counts.sum(0)
    short = np.flatnonzero(need > have)
    if len(short) and not reuse:
        c = short[0]
        raise ValueError(
            f"class {kinds[c]} has {have[c]} rows, the partition needs {need[c]} "
            f"({len(short)} of {len(kinds)} classes are short): lower volume or clients"
        )
    shuffled = rng.permutation(len(labels))
    pool = shuffled[np.argsort(kind_of[shuffled], kind="stable")]
    kind_of_place = np.repeat(np.arange(len(kinds)), need)
    place = np.arange(need.sum()) - np.repeat(np.cumsum(need) - need, need)
    rows = pool[(np.cumsum(have) - have)[kind_of_place] + place % have[kind_of_place]]
    home = np.repeat(np.tile(np.arange(len(counts)), len(kinds)), counts.T.ravel())
    return rows[np.argsort(home + rng.random(len(home)))], counts.sum(1)


def apportion(shares: np.ndarray, total: int, rng: Generator) -> np.ndarray:
    """Whole numbers in proportion to `shares` [..., C] that add up to `total`: largest remainders, ties at random."""
    exact = shares * total
    whole = np.floor(exact + 1e-9)
    rest = total - whole.sum(-1, keepdims=True)
    remainder = np.round(exact - whole, 9) + 1e-10 * rng.random(exact.shape)
    rank = np.argsort(np.argsort(-remainder, axis=-1), axis=-1)
    return (whole + (rank < rest)).astype(np.int64)


def _volume(n: int, clients: int, volume: int | None, *, reuse: bool = False) -> int:
    each = n // clients if volume is None else volume
    if each < 1:
        raise ValueError(f"{clients} clients for {n} rows leave some without any: lower clients")
    if each * clients > n and not reuse:
        raise ValueError(
            f"volume {each} for {clients} clients needs {each * clients} rows, there are {n}: lower volume or clients"
        )
    return each


def _dirichlets(alpha: np.ndarray, rng: Generator) -> np.ndarray:
    """One draw per row. In logarithms, as small concentrations underflow: log G(a) = log G(a + 1) + log(U) / a."""
    log = np.log(rng.standard_gamma(alpha + 1)) + np.log1p(-rng.random(alpha.shape)) / alpha
    weight = np.exp(log - log.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def _top_up(counts: np.ndarray, least: int) -> None:
    """Move rows from the largest clients to those with fewer than `least`, in place."""
    sizes = counts.sum(1)
    for k in np.flatnonzero(sizes < least):
        while sizes[k] < least:
            giver = sizes.argmax()
            c = counts[giver].argmax()
            counts[giver, c] -= 1
            counts[k, c] += 1
            sizes[giver] -= 1
            sizes[k] += 1


def _slots(weight: np.ndarray, clients: int, each: int, rng: Generator) -> np.ndarray:
    """How many clients hold a class: near proportion to its weight, at least one where possible, at most all."""
    total = clients * each
    slots = np.minimum(apportion(weight / weight.sum(), total, rng), clients)
    if total >= len(weight):
        slots = np.maximum(slots, 1)
    while (excess := int(slots.sum()) - total) != 0:
        free = (slots > 1) if excess > 0 else (slots < clients)
        pressure = np.where(free, slots / weight, -np.inf if excess > 0 else np.inf)
        slots[pressure.argmax() if excess > 0 else pressure.argmin()] -= np.sign(excess)
    return slots


def _assign(slots: np.ndarray, clients: int, each: int, rng: Generator) -> np.ndarray:
    """A random [clients, classes] table of 0 and 1 with `each` ones per row and `slots[c]` ones in column c.

    A class with as many slots left as there are clients left goes to all of them; the others are drawn
    in proportion to their slots. This never runs into a dead end.
    """
    holds = np.zeros((clients, len(slots)), np.int64)
    left = slots.copy()
    race = rng.exponential(size=holds.shape)
    for k in range(clients):
        forced = left == clients - k
        with np.errstate(divide="ignore"):
            order = np.where(forced, -1.0, race[k] / left)
        holds[k, np.argsort(order, kind="stable")[:each]] = 1
        left -= holds[k]
    return holds[rng.permutation(clients)]
