"""Examples in docstrings as blocks of code: Markdown takes their prompts for quotations."""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.M)


class Examples(griffe.Extension):
    """Fences what starts with a prompt, up to an empty line."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
