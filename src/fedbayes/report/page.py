"""The page: a list of sections, each made from the files of the runs, or left out where they have nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from fedbayes.report.certainty import calibration, intervals, plane, retained
from fedbayes.report.confusions import confusions
from fedbayes.report.coverage import coverage
from fedbayes.report.drawing import page_style, svg
from fedbayes.report.gallery import gallery, three
from fedbayes.report.influence import influence
from fedbayes.report.labelling import labelling
from fedbayes.report.learning import costs, curves, key
from fedbayes.report.material import Card, Figure, Material, Section
from fedbayes.report.outside import outside
from fedbayes.report.overview import closing, code, missing, settings, what_was_run
from fedbayes.report.people import clients
from fedbayes.report.survival import survival
from fedbayes.report.waiting import waiting
from fedbayes.version import __version__

STUCK = 6  # with more runs their boxes do not stay in view: they would cover the page
SECTIONS: tuple[Callable[[Material], Section | None], ...] = (
    closing,
    labelling,
    curves,
    waiting,
    three,
    calibration,
    confusions,
    intervals,
    survival,
    retained,
    outside,
    plane,
    gallery,
    clients,
    coverage,
    influence,
    costs,
    settings,
)


def page(material: Material, title: str) -> str:
    """The report as one HTML text that needs nothing beside it."""
    sections = sections_of(material)
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{s.key}">{escape(s.title)}</a>' for s in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} · fedbayes</title>\n<style>\n{page_style()}{style}{_switches(material)}</style>\n"
        '</head>\n<body>\n<a class="skip" href="#scores">Skip to the scores</a>\n'
        f"<header><h1>{escape(title)}</h1>{what_was_run(material)}</header>\n"
        f"{_controls(material)}\n<nav aria-label=Sections>{links}</nav>\n"
        f"<main>\n{''.join(map(_section, sections))}{missing(material)}</main>\n"
        f"<footer>fedbayes {escape(__version__)}</footer>\n</body>\n</html>\n"
    )


def sections_of(material: Material) -> list[Section]:
    """The sections for which the runs have something."""
    return [section for make in SECTIONS if (section := make(material))]


def figures_in(sections: Sequence[Section]) -> Iterator[Figure]:
    """All figures of the page in order; those of one run are titled by their section too, as files stand alone."""
    for section in sections:
        for piece in section.body:
            if isinstance(piece, Figure):
                yield piece._replace(title=f"{section.title}: {piece.title}") if piece.run >= 0 else piece


def _controls(m: Material) -> str:
    """A box for each run that shows or hides it in all figures, and the choice of a scheme; both without a script."""
    boxes = "".join(f'<label><input type="checkbox" id="run{run.number}" checked>{key(run)}</label>' for run in m.runs)
    schemes = "".join(
        f'<label><input type="radio" name="scheme" id="scheme-{name}"{chosen}>{name}</label>'
        for name, chosen in (("auto", " checked"), ("light", ""), ("dark", ""))
    )
    many = " many" if len(m.runs) > STUCK else ""
    return (
        f'<div class="controls{many}"><fieldset><legend>Runs</legend>{boxes}</fieldset>'
        f'<fieldset class="scheme"><legend>Scheme</legend>{schemes}</fieldset></div>'
    )


def _switches(m: Material) -> str:
    rules = (f":root:has(#run{run.number}:not(:checked)) main .r{run.number}{{display:none}}" for run in m.runs)
    return "\n".join([*rules, ""])


def _section(section: Section) -> str:
    """Figures that follow each other stand in one grid."""
    blocks = []
    for plain, pieces in groupby(section.body, lambda piece: isinstance(piece, str)):
        block = "".join(map(_piece, pieces))
        blocks.append(block if plain else f'<div class="charts">{block}</div>')
    lead = f"<p>{code(section.lead)}</p>" if section.lead else ""
    head = f'<h2><a href="#{section.key}">{escape(section.title)}</a></h2>'
    return f'<section id="{section.key}">{head}{lead}{"".join(blocks)}</section>\n'


def _piece(piece: Figure | Card | str) -> str:
    match piece:
        case Figure():
            return _figure(piece)
        case Card():
            look = "card broad" if piece.broad else "card"
            return f'<div class="{look}"><h3>{escape(piece.title)}</h3>{piece.content}</div>'
        case _:
            return piece


def _figure(figure: Figure) -> str:
    wide = figure.drawing.width > 500
    names = [*(["broad"] if wide else []), *([f"r{figure.run}"] if figure.run >= 0 else [])]
    look = f' class="{" ".join(names)}"' if names else ""
    drawn = f'<div class="wide" tabindex="0">{svg(figure.drawing)}</div>' if wide else svg(figure.drawing)
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    return f'<figure{look} data-name="{escape(figure.name)}"><h3>{escape(figure.title)}</h3>{drawn}{caption}</figure>'
