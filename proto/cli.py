"""The ``weightcast`` command. Each command's module is imported only when that command is called."""

from __future__ import annotations

import sys
from importlib.metadata import version

from cyclopts import App

from .errors import WeightcastError

app = App(
    name="weightcast",
    help="Fresh trainer weights into running SGLang servers, over NCCL.",
    version=lambda: version("weightcast"),
)
# Import paths, not imports: `weightcast status` must start without torch, and this package may not
# depend on the three that depend on it.
app.command("weightcast.broadcaster.cli:broadcaster", name="broadcaster")
app.command("weightcast.rollout_node.cli:rollout_node", name="rollout-node")
app.command("weightcast.broadcaster.cli:status", name="status")
app.command("weightcast.trainer_hooks.cli:push", name="push")
app.command("weightcast.trainer_hooks.demo.cli:demo", name="demo")


def main() -> None:
    """Run one command. An error of ours is one line on stderr and exit status 2."""
    try:
        app()
    except WeightcastError as error:
        print(f"weightcast: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
