"""``python -m weightcast.rollout_node``: the same as ``weightcast rollout-node``."""

from __future__ import annotations

import sys

from cyclopts import App

from ..proto.errors import WeightcastError
from .cli import rollout_node

app = App(name="weightcast rollout-node", help=rollout_node.__doc__)
app.default(rollout_node)

if __name__ == "__main__":
    try:
        app()
    except WeightcastError as error:
        print(f"weightcast: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
