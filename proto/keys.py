"""Keys come from files: on a command line every user of the host could read them."""

from __future__ import annotations

from pathlib import Path

from .errors import InvalidConfig


def read_key(path: Path | None) -> str | None:
    """The first line of a key file; None for no file.

    Raises:
        InvalidConfig: if it cannot be read or is empty.
    """
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError as error:
        raise InvalidConfig(f"cannot read the key file {path}: {error.strerror}") from error
    if not key:
        raise InvalidConfig(f"the key file {path} is empty; its first line must be the key")
    return key
