"""As a hook of mkdocs: the script that lets the search run in a folder comes with the site, not from elsewhere."""

from typing import Any

from mkdocs.utils import get_relative_url

ELSEWHERE, HERE = "https://unpkg.com/iframe-worker/shim", "worker.js"


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return output.replace(ELSEWHERE, get_relative_url(HERE, page.url))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    return output_content.replace(ELSEWHERE, HERE)
