"""What a reader of an HTML page finds in it."""

import re
from html.parser import HTMLParser


class _Tables(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self._inside = True
        elif tag == "small" and self._inside:
            self.tables[-1][-1][-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.tables[-1][-1][-1] += data


def tables(page: str) -> list[list[list[str]]]:
    """The texts of all cells of every table, by row; a second, small line stands behind ` | `."""
    parser = _Tables()
    parser.feed(page)
    return parser.tables


def table(page: str, head: str) -> list[list[str]]:
    """The one table with this cell in its first row."""
    [found] = [each for each in tables(page) if head in each[0]]
    return found


def check_offline(page: str) -> None:
    """Nothing is loaded from elsewhere: namespaces are names, and sounds and pictures are embedded."""
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:)?//|@import""", page)
    assert set(re.findall(r'<(?:audio|img|link|script)[^>]*(?:src|href)="(\w+):', page)) <= {"data"}
    assert page.count("<script>") == 1 == page.count("</script>")
