"""Buckets in front of a robust rule: clients are dealt to a few sums, and the rule sees one posterior for each.

Karimireddy, He and Jaggi (2022). Within a bucket uploads are added by a rule that is a sum, each client counting once.
So b buckets need memory O(b * weights) however many clients there are, stream through every engine, and each may be a
secure sum of its own. Posteriors of buckets are more alike than those of clients, which robust rules are better at. But
one client that lies spoils its whole bucket: there must be more than two buckets for each.
"""

from __future__ import annotations

from fedbayes.errors import InputError
from fedbayes.federation.pooling import static_rules
from fedbayes.federation.program import Program
from fedbayes.federation.robust import count_of
from fedbayes.federation.rule import Rule
from fedbayes.federation.rules import RULES
from fedbayes.federation.weighting import WEIGHTINGS

ROBUST = ", ".join(name for name, rule in RULES.items() if rule.robust)


def spoilt_share(buckets: int, cohort: int, outliers: float) -> float:
    """The share of buckets that may be spoilt, each by a client that lies.

    Refuses more buckets than clients, and so few that those who lie could outvote the others.
    """
    if buckets > cohort:
        raise InputError(f"buckets: {buckets} are more than a cohort has clients ({cohort}); set at most {cohort}")
    lying = count_of(outliers, cohort)
    if 2 * lying >= buckets:
        raise InputError(
            f"buckets: {lying} of {cohort} clients may lie (outliers = {outliers:g}) and spoil as many of {buckets} "
            f"buckets; set at least {2 * lying + 1}, or fewer outliers"
        )
    return lying / buckets


def bucketed(program: Program, buckets: int, within: Rule, over_them: Rule) -> Program:
    """The program with the robust rule `over_them` over the posteriors of buckets, which are pooled by `within`."""
    rules, main = program.pooling.rules, program.pooling.rules[program.prediction.part]
    over = {part: over_them if rule is main else rule for part, rule in rules.items() if rule.robust}
    if not main.robust:
        raise InputError(f"buckets: they stand in front of a robust rule ({ROBUST}); set one, or leave buckets out")
    static = static_rules(program.model)
    plain = {
        part: static[part] if part in static else within if _takes(within, program, part) else RULES["fedavg"]
        for part in over
    }
    pooling = program.pooling._replace(
        rules={**rules, **plain}, over=over, buckets=buckets, weighting=WEIGHTINGS["equal"]
    )
    return program._replace(pooling=pooling)


def _takes(rule: Rule, program: Program, part: str) -> bool:
    return isinstance(program.initial[part], rule.takes)


def check_streaming(program: Program) -> None:
    """Refuse buckets where something needs every upload, which they do not hold."""
    if program.pooling.buckets and program.needs_uploads:
        raise InputError(
            "buckets: this method, or a stage of it, looks at every client's upload, and a bucket is a sum; "
            "leave buckets out"
        )
