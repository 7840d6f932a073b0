"""The secret that the processes of a job share: from the environment, or from a file of the user's."""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from bapipe.errors import BapipeError
from bapipe.user_folders import user_folder

VARIABLE = "BAPIPE_JOB_SECRET"

_NUM_BYTES = 32

_LEAST_GIVEN = 16
"""Least length of a secret that is given: who has seen a proof of a shorter one could try all of them."""


def new_secret() -> bytes:
    """Returns a secret that nobody else knows."""
    return secrets.token_bytes(_NUM_BYTES)


def digest(key: bytes, *parts: bytes) -> bytes:
    """Returns the HMAC-SHA256 of some parts; each has its length before it, so that no two lists give the same."""
    return hmac.new(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), hashlib.sha256).digest()


def job_secret() -> bytes:
    """Returns the secret of this process's job.

    It is the environment variable BAPIPE_JOB_SECRET, or else the user's own, which is made at its first use: hosts
    with a common home folder then need no setting.

    Raises:
        BapipeError: the variable is too short; or the file can be read by others, or there is none and it cannot be
            written.
    """
    given = os.environ.get(VARIABLE, "").encode()
    if 0 < len(given) < _LEAST_GIVEN:
        raise BapipeError(
            f"{VARIABLE} has {len(given)} characters, which can be guessed: set it to the same random text of at least "
            f"{_LEAST_GIVEN} for all ranks, such as that of `openssl rand -hex 32`"
        )
    if given:
        return given
    path = secret_path()
    try:
        if not path.exists():
            _create(path)
        return _read(path)
    except OSError as error:
        raise BapipeError(
            f"{path}: the job's secret cannot be kept there: {error.strerror}; set {VARIABLE} to the same random text "
            "for all ranks"
        ) from None


def secret_path() -> Path:
    """Returns the file of the user's secret."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "job-secret"


def _create(path: Path) -> None:
    """Writes a new secret, unless another process of the job has done so meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(new_secret().hex().encode() + b"\n")
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise BapipeError(
                f"{path}: the job's secret can be read or changed by others: make it your own with mode 600, or remove "
                "it"
            )
        secret = file.read().strip()
    if len(secret) < _NUM_BYTES:
        raise BapipeError(f"{path}: a secret of {len(secret)} characters is too short: remove it")
    return secret
