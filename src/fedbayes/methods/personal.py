"""Personal methods: clients that keep weights, or a posterior, of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from fedbayes.clients.bilevel import bilevel, own_model
from fedbayes.clients.home import Split, keep_home, whole_model
from fedbayes.errors import InputError
from fedbayes.federation.program import Personal, Program
from fedbayes.federation.rule import Rule
from fedbayes.federation.rules import RULES
from fedbayes.federation.weighting import WEIGHTINGS, Weighting
from fedbayes.methods.groups import Descent, Newton, PaperDraws, Robustness, optimiser_named
from fedbayes.methods.method import Setting
from fedbayes.methods.points import FedAvg
from fedbayes.methods.variational import ByBackprop, FedVI, Variational
from fedbayes.model.classifier import HEAD, last_layer
from fedbayes.options import one_of, option, options_of, patterns, positive, record, with_default
from fedbayes.posterior.layout import matches
from fedbayes.posterior.values import Parts


@record
class FedPer(FedAvg):
    """FedAvg whose clients keep some weights for themselves, by pattern: the last layer (Arivazhagan et al., 2019)."""

    name: ClassVar[str] = "fedper"
    home: tuple[str, ...] = option("patterns of weights that never leave a client", patterns, default=(HEAD,))

    def compose(self, setting: Setting) -> Program:
        return keeping_home(super().compose(setting), setting, home=tuple(self.home))


@record
class LGFedAvg(FedAvg):
    """FedAvg of some weights only, by pattern: the last layer; all others stay home (Liang et al., 2020)."""

    name: ClassVar[str] = "lg_fedavg"
    shared: tuple[str, ...] = option("patterns of weights that are shared", patterns, default=(HEAD,))

    def compose(self, setting: Setting) -> Program:
        return keeping_home(super().compose(setting), setting, shared=tuple(self.shared))


@record
class BPFed(ByBackprop):
    """BPFed: variational clients that keep some weights, by pattern; their prior is the client's own last posterior.

    Chen et al. (2023). What is shared has the broadcast as its prior, and is pooled by `rule`.
    """

    name: ClassVar[str] = "bpfed"
    home: tuple[str, ...] = option("patterns of weights that never leave a client", patterns, default=(HEAD,))

    def compose(self, setting: Setting) -> Program:
        return keeping_home(super().compose(setting), setting, home=tuple(self.home))


@record
class PFedBayes(Variational, PaperDraws, Robustness):
    """pFedBayes: a personal posterior held near the client's copy of the global one, which follows it (Zhang, 2022).

    `kl_weight` is the paper's zeta against the summed log-likelihood (`kl` = "1/n"). The copies are pooled as means of
    (mean, rho).
    """

    name: ClassVar[str] = "pfedbayes"
    fixed: ClassVar[Mapping[str, str]] = {
        "prior": "it is the client's copy of the global posterior",
        **dict.fromkeys(options_of(Newton), "its two posteriors descend together, not by ivon"),
    }
    lr: float = with_default(Descent, "lr", default=0.001)
    optimiser: str = with_default(Descent, "optimiser", default="adam")
    kl: str = with_default(Variational, "kl", default="1/n")
    kl_weight: float = with_default(Variational, "kl_weight", default=10.0)
    train_draws: int = with_default(Variational, "train_draws", default=None)
    test_draws: int = with_default(Variational, "test_draws", default=None)
    global_lr: float | None = option(
        "step size of the copy of the global posterior; lr where it is not given", positive, default=None, kind="server"
    )
    division: float = with_default(FedVI, "division", default=1.0)
    rule: str | Rule = option(
        "how the copies are pooled", one_of(RULES), default="mean_rho", kind="server", importable=True
    )
    weighting: str | Weighting = option(
        "how clients are weighed", one_of(WEIGHTINGS), default="size", kind="server", importable=True
    )

    def check(self) -> None:
        self.resolve(train=1, test=20)
        super().check()

    def compose(self, setting: Setting) -> Program:
        program = self.pooled(
            setting,
            prior="broadcast",
            division=self.division,
            rule=self.rule_of(self.rule),
            weighting=self.weighting,
        )
        descent = optimiser_named(self.optimiser, self.momentum)
        client = bilevel(program.client, optimiser=descent, kl=self.kl, within=self.lr_within)
        lr = self.lr if self.global_lr is None else self.global_lr

        def scalars(number: int) -> Mapping[str, float]:
            own = program.options(number)
            return {**own, "global_lr": lr * own["lr"] / self.lr}

        return program._replace(client=client, personal=Personal(own_model(client, program.client)), options=scalars)


def keeping_home(
    program: Program, setting: Setting, *, home: tuple[str, ...] = (), shared: tuple[str, ...] = ()
) -> Program:
    """The program with the weights that match `home` never leaving a client; or all but those that match `shared`.

    There is no global model then: only personal ones predict.
    """
    layouts = program.model.layouts
    names = [n for layout in layouts.values() for n in layout.names]
    at_home = _named(setting.network, home or shared, names, "home" if home else "shared")
    if shared:
        at_home = tuple(n for n in names if not matches(n, at_home))
    split = Split.of(layouts, at_home)
    if program.prediction.part not in split.shared:
        raise InputError(f"home: nothing would be left to share; keep fewer weights than {', '.join(at_home[:4])}")
    client = keep_home(program.client, split, program.initial)
    return program._replace(
        client=client,
        personal=Personal(whole_model(client, program.tuned.finish)),
        initial=split.cut(program.initial)[0],
        pooling=program.pooling._replace(
            rules={part: rule for part, rule in program.pooling.rules.items() if part in split.shared},
            reference=_shared_only(program, split),
        ),
        prediction=program.prediction._replace(whole=False),
    )


def _shared_only(program: Program, split: Split) -> Any:
    """The reference of a sum over what is shared, from a program that knows whole broadcasts."""
    whole = split.cut(program.initial)[1]

    def reference(broadcast: Parts, options: Any) -> Parts:
        return split.cut(program.pooling.reference(split.merge(broadcast, whole), options))[0]

    return reference


def _named(network: nn.Module, short: tuple[str, ...], names: list[str], what: str) -> tuple[str, ...]:
    """Patterns with `head` replaced by the last layer's, each checked to match a weight."""
    full = tuple(last_layer(network) if pattern == HEAD else pattern for pattern in short)
    for pattern in full:
        if not any(matches(n, [pattern]) for n in names):
            raise InputError(f"{what}: no weight matches {pattern!r}; the network has {', '.join(names[:8])}, ...")
    return full
