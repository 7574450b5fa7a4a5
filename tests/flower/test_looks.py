"""Jobs beside training, behind a post: a calibration whose sums are those of here, and watches that stay at home."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import InProcess

from fedbayes.errors import InputError
from fedbayes.evaluate.conformal import THRESHOLDS, Gathered
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower import looks
from fedbayes.flower.border import Refusal, guarded
from fedbayes.flower.federated import carried, run
from fedbayes.flower.jobs import _state, calibrate, watch
from fedbayes.flower.kept import in_file
from fedbayes.flower.node import CALIBRATE, EVALUATE, PROMISE, REFINE, TRAIN, WATCH, Node
from fedbayes.flower.wire import Letter
from fedbayes.report.watch import write_page
from fedbayes.runs import calibrated, checkpoint, watched
from fedbayes.runs.folder import load
from fedbayes.runs.releases import releases_in
from fedbayes.runs.watched import State
from fedbayes.scores.label_shift import mix_of_labels, quantile_of_quantiles

EXPERIMENT = Experiment(
    data="flower_code:site",
    network="flower_code:net",
    clients=3,
    partition="own",
    method="feduab",
    rounds=2,
    options={"lr": 0.3, "epochs": 5, "test_draws": 3},
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Sites that hold their rows alone, as on their own machines; and the server's run folder."""
    folder = tmp_path_factory.mktemp("run") / "run"
    post = InProcess(carried(EXPERIMENT))
    return folder, post, run(EXPERIMENT, folder, post)["feduab"]


def test_histograms_are_added_and_thresholds_made_at_home(trained):
    folder, _, _ = trained
    post = InProcess(carried(EXPERIMENT))
    made = calibrate(EXPERIMENT, folder, post, coverage=0.7, way="label_shift")
    assert made.sites == ("0", "1", "2")
    assert made.rows == 12  # half of eight test rows, of three sites
    assert made.judged["rows"].tolist() == [4, 4, 4]
    kinds = [kind for kind, _, _ in post.asked]
    assert kinds.count(CALIBRATE) == kinds.count(PROMISE) == 3
    # What a node sends is a histogram of its own rows; the second letter carries the sum of all.
    sums = [letter.arrays["calibration"] for kind, _, letter in post.asked if kind == PROMISE]
    assert all(np.array_equal(s, made.counts.numpy()) for s in sums)
    for k in range(3):
        torch.testing.assert_close(made.for_mix(made.mix[k]), made.thresholds[k])
    assert calibrated.read(folder, load(folder)).thresholds.tolist() == made.thresholds.tolist()


@pytest.mark.parametrize("way", ["pooled", "by_class", "unlabelled", "own", "blended"])
def test_every_way_is_possible(trained, way):
    made = calibrate(EXPERIMENT, trained[0], InProcess(carried(EXPERIMENT)), coverage=0.6, way=way, score="adaptive")
    assert made.way == way
    assert made.judged["rows"].sum() == 12
    if way in ("pooled", "by_class", "unlabelled"):  # which follow from the sum and the mix alone
        here, _ = THRESHOLDS[way](Gathered(made.counts, [], made.edges), made.mix, 0.6, None)
        torch.testing.assert_close(made.thresholds, here)
    else:
        assert bool((made.thresholds[0] != made.thresholds[1]).any())


def listening():
    """A post, and what comes back by it, as (kind, answer)."""
    answers = []

    def heard(kind, client, letter, answer):
        answers.append((kind, answer))
        return answer

    return InProcess(carried(EXPERIMENT), spoil=heard), answers


def test_of_quantiles_one_number_leaves_a_site(trained):
    post, answers = listening()
    made = calibrate(EXPERIMENT, trained[0], post, coverage=0.6, way="quantiles")
    own = torch.tensor([a.arrays["calibration"][0, 0] for kind, a in answers if kind == CALIBRATE])
    assert all(a.arrays["calibration"].shape == (1, 1) for kind, a in answers if kind == CALIBRATE)
    one = quantile_of_quantiles(own, torch.full((3,), 4), 0.6)
    assert made.rows == 12
    assert bool((made.thresholds == one).all())
    assert bool((made.everywhere == one).all())
    assert bool((made.mix == 1 / 3).all())  # which nobody told
    assert calibrated.read(trained[0]).thresholds.tolist() == made.thresholds.tolist()


def test_under_epsilon_only_noised_counts_leave_a_site(trained, monkeypatch):
    post, answers = listening()
    made = calibrate(EXPERIMENT, trained[0], post, coverage=0.6, epsilon=1e4)  # noise that rounds to none
    plain = calibrate(EXPERIMENT, trained[0], InProcess(carried(EXPERIMENT)), coverage=0.6)
    sent = [a.arrays for kind, a in answers if kind == CALIBRATE]
    assert all(a["calibration"][:, :-1].sum() == 4 for a in sent)
    assert torch.equal(made.counts.sum(1), plain.counts.sum(1))
    assert all(not a.arrays for kind, a in answers if kind == PROMISE)  # thresholds and mixes stay at home
    assert bool(np.isnan(made.judged["size"]).all())
    assert "epsilon 10000 for every row" in made.source
    answers.clear()
    seeds = iter(range(100))
    monkeypatch.setattr(looks, "source_of", lambda: np.random.default_rng(next(seeds)))  # 1 in 20 passes
    with pytest.raises(InputError, match="all rows of all sites may be noise"):
        calibrate(EXPERIMENT, trained[0], post, coverage=0.6, epsilon=0.01)
    one = next(a.arrays["calibration"] for kind, a in answers if kind == CALIBRATE)
    assert np.abs(one).mean() > 50  # the noise of epsilon / 4 has a mean size of 400


@pytest.mark.parametrize("secure", [False, True])
def test_under_epsilon_a_site_s_threshold_follows_from_what_it_has_sent(trained, monkeypatch, secure):
    """Else one of its rows could move its threshold, and so many hits, whose noise is for a change of one."""
    if secure:
        pytest.importorskip("cryptography", reason="a secure sum needs Flower's cryptography")
    x = replace(EXPERIMENT, flower={"secure": secure})
    sent, mixes, real, rule = [], [], looks.noised, THRESHOLDS["label_shift"]

    def noised(*given):
        sent.append(real(*given))
        return sent[-1]

    def thresholds(gathered, mix, *more):
        assert gathered.own == []
        mixes.append((mix, gathered.counts.sum(1)))
        return rule(gathered, mix, *more)

    monkeypatch.setattr(looks, "noised", noised)
    monkeypatch.setitem(THRESHOLDS, "label_shift", thresholds)
    post = InProcess(carried(x))
    calibrate(x, trained[0], post, coverage=0.6, epsilon=40.0)
    assert len(sent) == len(mixes) == 3
    for (mix, everywhere), own in zip(mixes, sent):
        torch.testing.assert_close(mix[0], mix_of_labels(own[:, -1].clamp_min(0), everywhere))
    asked = {k: letter for kind, k, letter in post.asked if kind == PROMISE}
    for way in ("own", "quantiles"):  # a server that leaves out what the library checks
        letter = Letter({**asked[0].head, "way": way}, asked[0].arrays)
        assert "shows what is not noised" in post._answer(PROMISE, 100, letter).head["refused"]
    post.made.clear()  # a node that was started again
    assert "begin it again" in post._answer(PROMISE, 101, asked[1]).head["refused"]


def test_what_a_node_must_not_say_is_refused_and_the_others_calibrate(trained):
    def lying(kind, client, letter, answer):
        if kind == CALIBRATE and client == 1:
            return Letter(answer.head, {"calibration": 1000 * answer.arrays["calibration"]})
        if kind == PROMISE and client == 2:
            return Letter({**answer.head, "hits": 99}, answer.arrays)
        return answer

    post = InProcess(carried(EXPERIMENT), spoil=lying)
    made = calibrate(EXPERIMENT, trained[0], post, coverage=0.6)
    assert made.rows == 8
    assert made.sites == ("0", "1")
    nobody = InProcess(carried(EXPERIMENT), spoil=lambda kind, c, letter, a: Letter({}, {}) if kind == CALIBRATE else a)
    with pytest.raises(InputError, match="no client sent a histogram"):
        calibrate(EXPERIMENT, trained[0], nobody)


def test_a_node_whose_experiment_says_secure_uploads_nothing_in_the_clear(tmp_path):
    post = InProcess(carried(EXPERIMENT))
    hidden, letters = InProcess(carried(replace(EXPERIMENT, flower={"secure": True}))), []
    post.spoil = lambda kind, k, letter, said: letters.append((kind, k, letter)) or said
    run(replace(EXPERIMENT, rounds=1), tmp_path, post)
    asked = [(k, letter) for kind, k, letter in letters if kind == TRAIN]
    assert len(asked) == 3
    for k, letter in asked:
        answer = hidden._answer(TRAIN, 100 + k, letter)
        assert "secure = true" in answer.head["refused"]
        assert not answer.arrays


def test_what_can_t_be_done_here_is_named(trained):
    post = InProcess(carried(EXPERIMENT))
    with pytest.raises(InputError, match="epsilon: way 'own' shows what is not noised"):
        calibrate(EXPERIMENT, trained[0], post, way="own", epsilon=1.0)
    with pytest.raises(InputError, match="epsilon must be a positive number"):
        calibrate(EXPERIMENT, trained[0], post, epsilon=0.0)
    with pytest.raises(InputError, match="unknown way to calibrate on Flower"):
        calibrate(EXPERIMENT, trained[0], post, way="quantile")
    with pytest.raises(InputError, match="confidence: one number from each site says nothing of it"):
        calibrate(EXPERIMENT, trained[0], post, way="quantiles", confidence=0.9)
    with pytest.raises(InputError, match="has no checkpoint yet"):
        calibrate(EXPERIMENT, trained[0] / "elsewhere", post)


def with_streams(folder, streams, x=EXPERIMENT):
    """Nodes whose new rows come into files, and who keep what they have seen."""
    post = InProcess(carried(x))
    for k, path in streams.items():
        node = Node(carried(x).only("feduab"), k)
        node.stream, node.state = str(path), str(folder / f"node-{k}")
        post.made["feduab", 100 + k] = node, in_file(folder / f"kept-{k}")
    return post


def test_watches_stay_at_home_and_go_on(trained, tmp_path):
    folder, _, _ = trained
    random = np.random.default_rng(0)
    rows = np.eye(3)[random.integers(0, 3, 160)][:, :2] * 2 + 0.7 * random.standard_normal((160, 2))
    changed = rows.copy()
    changed[40:] += 9
    paths = {}
    for k, values in ((0, rows), (1, changed)):
        paths[k] = tmp_path / f"stream-{k}.csv"
        np.savetxt(paths[k], values[:60], delimiter=",")
    post = with_streams(tmp_path, paths)
    first = watch(EXPERIMENT, folder, post)
    assert [(s.site, s.rows) for s in first] == [("0", 60), ("1", 60)]
    for k, values in ((0, rows), (1, changed)):
        np.savetxt(paths[k], values, delimiter=",")
    post = with_streams(tmp_path, paths)  # nodes that were started again
    states = {s.site: s for s in watch(EXPERIMENT, folder, post)}
    assert [s.rows for s in states.values()] == [160, 160]
    assert states["0"].alarm is None
    assert states["1"].alarm is not None
    assert states["1"].alarm.row > 40
    letters = [letter for kind, _, letter in post.asked if kind == WATCH]
    assert letters
    home = next((tmp_path / "node-1").rglob("*.npz"))
    assert watched.read(home).alarms == states["1"].alarms
    assert "1 of 2 sites have changed" in write_page(folder).read_text()


WATCHES = {
    "plain": ({}, True),
    "a name of 17 million letters": ({"channels": ["x" * 17_000_000]}, False),
    "a name of escape codes": ({"channels": ["\x1b[31m<script>"]}, False),
    "a name twice": ({"channels": ["energy", "energy"], "kinds": ["inputs", "inputs"]}, False),
    "an alarm": ({"alarms": ["3|energy|inputs|closed up"]}, True),
    "an alarm after more rows than were seen": ({"alarms": ["6|energy|inputs|rose"]}, False),
    "an alarm after 10^4000 rows": ({"alarms": ["9" * 4000 + "|energy|inputs|rose"]}, False),
    "an alarm that says what none does": ({"alarms": ["3|energy|inputs|\x1b[2J"]}, False),
    "a history of rows that were not seen": ({"history": np.array([[6.0, 0.1]])}, False),
    "a history that overflows": ({"history": np.array([[1.0, 1e308], [2.0, -1e308]])}, False),
    "a fortune that overflows": ({"logs": np.array([1e308])}, False),
}


@pytest.mark.parametrize("what", WATCHES)
def test_what_a_node_tells_of_its_watch_leaves_the_page_of_the_others(tmp_path, what):
    change, taken = WATCHES[what]
    head = {"rows": 5, "reference": 10, "alarms": [], "channels": ["energy"], "kinds": ["inputs"]}
    arrays = {"history": np.array([[5.0, 0.1]]), "logs": np.array([0.1])}
    told = {**head, **arrays, **change}
    letter = Letter({name: told[name] for name in head}, {name: told[name] for name in arrays})
    state = guarded(1, _state, letter, {}, 10)
    assert isinstance(state, State) == taken
    if taken:
        watched.write(watched.path_of(tmp_path, "1"), state)
        assert write_page(tmp_path).is_file()
    else:
        assert isinstance(state, Refusal)
        assert state.offence
        assert len(state.reason) < 200


def test_a_client_without_a_stream_says_what_is_missing(trained):
    with pytest.raises(InputError, match="it has no stream: start its node with"):
        watch(EXPERIMENT, trained[0], InProcess(carried(EXPERIMENT)))


def test_under_masks_the_sum_is_the_same_and_no_histogram_is_seen(trained):
    pytest.importorskip("cryptography", reason="a secure sum needs Flower's cryptography: make test-flower installs it")
    secure = replace(EXPERIMENT, flower={"secure": True})
    clear = calibrate(EXPERIMENT, trained[0], InProcess(carried(EXPERIMENT)), coverage=0.7)
    post = InProcess(carried(secure))
    made = calibrate(secure, trained[0], post, coverage=0.7)
    assert torch.equal(made.counts, clear.counts)
    assert np.array_equal(made.judged["hits"], clear.judged["hits"])
    assert bool(made.thresholds.isinf().all())  # they stay with the sites
    assert CALIBRATE not in {kind for kind, _, _ in post.asked}
    with pytest.raises(InputError, match="histograms leave it under masks alone"):  # a server that asks in the clear
        calibrate(EXPERIMENT, trained[0], post, coverage=0.7)
    pooled = calibrate(secure, trained[0], InProcess(carried(secure)), coverage=0.7, way="by_class")
    plain = calibrate(EXPERIMENT, trained[0], InProcess(carried(EXPERIMENT)), coverage=0.7, way="by_class")
    assert torch.equal(pooled.thresholds, plain.thresholds)
    noised = calibrate(secure, trained[0], InProcess(carried(secure)), coverage=0.7, way="by_class", epsilon=1e4)
    assert torch.equal(noised.counts.sum(1), plain.counts.sum(1))
    with pytest.raises(InputError, match="which a secure sum hides"):
        calibrate(secure, trained[0], InProcess(carried(secure)), way="quantiles")


@pytest.fixture(scope="module", params=[False, True])
def private(tmp_path_factory, request):
    """A private run in a folder, whose sites' test rows are a secret, or are not."""
    pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
    private = {"private": "clients", "noise_multiplier": 0.1, "public_test": request.param}
    x = replace(EXPERIMENT, rounds=1, options={**EXPERIMENT.options, "weighting": "equal"}, **private)
    folder = tmp_path_factory.mktemp("private") / "run"
    run(x, folder, InProcess(carried(x)))
    return x, folder


def test_a_calibration_is_in_the_account_before_a_node_is_asked(private, tmp_path, monkeypatch):
    x, folder = private
    folder = Path(shutil.copytree(folder, tmp_path / "run"))
    x = replace(x, epsilon=load(folder).epsilon + 1e4)
    monkeypatch.setattr(checkpoint, "_check_config", lambda *arguments: None)  # a budget that it did not begin with
    post = InProcess(carried(x))
    spent = len(releases_in(folder))
    real, seen = post.push, []

    def push(kind, letters, seconds):
        seen.append((kind, len(releases_in(folder)) - spent))
        return real(kind, letters, seconds)

    monkeypatch.setattr(post, "push", push)
    for refused in ({"epsilon": 2e4}, {"epsilon": 5e3, "way": "own"}, {"epsilon": 5e3, "score": "weighted"}):
        with pytest.raises(InputError, match=r"epsilon: this calibration would spend|way|score"):
            calibrate(x, folder, post, coverage=0.6, **refused)
    assert not [kind for kind, _ in seen if kind in (CALIBRATE, PROMISE)]
    calibrate(x, folder, post, coverage=0.6, epsilon=6e3)
    assert {number for kind, number in seen if kind in (CALIBRATE, PROMISE)} == {1}
    with pytest.raises(InputError, match="there is 4000 left"):
        calibrate(x, folder, post, coverage=0.6, epsilon=6e3)


def test_a_private_run_tells_of_test_rows_under_noise_or_where_they_are_public(private, tmp_path):
    x, folder = private
    rows = tmp_path / "stream.csv"
    np.savetxt(rows, np.zeros((5, 2)), delimiter=",")
    post = with_streams(tmp_path, {0: rows}, x)
    before = load(folder).epsilon
    made = calibrate(x, folder, post, coverage=0.6, epsilon=1e4)
    assert made.rows == 12
    assert bool((made.mix == 1 / 3).all())  # which stay at home
    assert load(folder).epsilon == pytest.approx(before + 1e4)
    if x.public_test:
        made = calibrate(x, folder, InProcess(carried(x)), coverage=0.6)
        sums = made.counts.sum(1)
        for k, mix in enumerate(made.mix):
            node = Node(carried(x).only("feduab"), k)
            labels = node.task.clients.data.test_y[looks.halves(node)[0]]
            torch.testing.assert_close(mix, mix_of_labels(torch.bincount(labels, minlength=3), sums))
        assert [state.rows for state in watch(x, folder, with_streams(tmp_path / "again", {0: rows}, x))] == [5]
        return
    last = [letter for kind, k, letter in post.asked if (kind, k) == (PROMISE, 0)][-1]
    for kind in (CALIBRATE, PROMISE, WATCH, EVALUATE, REFINE):  # a server that leaves out what the library checks
        letter = Letter({**last.head, "epsilon": 0.0, "alpha": 0.05}, last.arrays)
        assert "the run is private" in post._answer(kind, 100, letter).head["refused"]
    with pytest.raises(InputError, match="the run is private, and histograms of its test rows have no noise: give"):
        calibrate(x, folder, post, coverage=0.6)
    with pytest.raises(InputError, match="the run is private, and fortunes of bets of its test rows have no noise"):
        watch(x, folder, post)
