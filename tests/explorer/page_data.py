"""What is in the file of a page."""

import base64
import gzip
import json
import re
from typing import Any


def data_of(page: bytes) -> Any:
    """Returns the data of a page: what its scripts draw."""
    text = page.decode().partition('id="data">')[2].partition("</script>")[0]
    return json.loads(gzip.decompress(base64.b64decode(text)))


def loads_nothing(page: bytes) -> bool:
    """Returns whether no text in a page names another address; SVG's own name is not fetched."""
    text = page.decode().replace("http://www.w3.org/2000/svg", "")
    return not any(re.search(pattern, text) for pattern in ("http", r"\bsrc=", "@import", r"url\((?!#)"))
