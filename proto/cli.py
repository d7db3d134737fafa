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
# For the same reason the one-line helps stand here.
for _name, _path, _help in (
    ("broadcaster", "weightcast.broadcaster.cli:broadcaster", "Run a training job's broadcaster."),
    ("rollout-node", "weightcast.rollout_node.cli:rollout_node", "Run the agent beside an SGLang server."),
    (
        "push",
        "weightcast.trainer_hooks.cli:push",
        "Refit servers from a checkpoint folder (exit status 0: all ready, 1: failed, 2: not tried).",
    ),
    ("status", "weightcast.broadcaster.cli:status", "Show a broadcaster's nodes, versions and states."),
    ("demo", "weightcast.trainer_hooks.demo.cli:demo", "Train, refit and compare, on this machine."),
):
    app.command(_path, name=_name, help=_help)


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
