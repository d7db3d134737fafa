"""``python -m weightcast.broadcaster``: as ``weightcast broadcaster``, for those who start one as a child."""

import sys

from cyclopts import App

from ..proto.errors import WeightcastError
from .cli import broadcaster

app = App(name="weightcast-broadcaster")
app.default(broadcaster)

if __name__ == "__main__":
    try:
        app()
    except WeightcastError as error:
        sys.stderr.write(f"weightcast: {error}\n")
        sys.exit(2)
