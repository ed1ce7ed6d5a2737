"""Signatures of runs: who vouches for the lines of a record file. Off by default; Ed25519, by `cryptography`.

A signature covers the SHA-256 of the text of every line of its run, in order, and follows these lines. Files can
therefore be concatenated, and lines of other runs in between change nothing. A key file is PEM, as written by `openssl
genpkey -algorithm ed25519`. Trusted keys are in a file of hexadecimal public keys, one per line.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megamoe.contract.plain import plain_bytes
from megamoe.records.lines import RecordError, Signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MISSING = (
    "signatures need the package cryptography, which is not installed here: in a checkout, pip install -e '.[sign]'"
)

_MAKES_ONE = "openssl genpkey -algorithm ed25519 makes one"


def private_key(path: Path) -> Ed25519PrivateKey:
    """The key in a PEM file. Raises RecordError if there is none."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise RecordError(MISSING) from None
    try:
        found = load_pem_private_key(plain_bytes(path), None)
    except OSError as error:
        raise RecordError(f"cannot read the key {path}: {error.strerror}; {_MAKES_ONE}") from error
    except (ValueError, TypeError):
        raise RecordError(f"{path} holds no private key that can be read without a password; {_MAKES_ONE}") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise RecordError(f"{path} holds a key of another kind than Ed25519; {_MAKES_ONE}")
    return found


def signed(run: str, data: bytes, key: Ed25519PrivateKey) -> Signature:
    """The signature of `run`, whose lines are in a file with content `data`."""
    text = key.sign(_digest(data, run))
    return Signature(run=run, key=key.public_key().public_bytes_raw().hex(), signature=text.hex())


def trusted_keys(path: Path) -> frozenset[str]:
    """The public keys in a file: hexadecimal, one per line, with the owner after a #. Raises RecordError for any other
    line."""
    try:
        lines = plain_bytes(path).decode("utf-8").splitlines()
    except OSError as error:
        right = "name a file with a public key of 64 hexadecimal digits on each line"
        raise RecordError(f"cannot read the trusted keys {path}: {error.strerror}; {right}") from error
    except UnicodeDecodeError:
        raise RecordError(f"cannot read the trusted keys {path}: it is no text") from None
    keys = {number: line.partition("#")[0].strip().lower() for number, line in enumerate(lines, 1)}
    for number, key in keys.items():
        if key and (len(key) != 64 or set(key) - set("0123456789abcdef")):
            raise RecordError(f"{path}, line {number}: {key[:80]!r} is no public key, 64 hexadecimal digits")
    found = frozenset(key for key in keys.values() if key)
    if not found:
        raise RecordError(f"{path} holds no key, so that nothing could be trusted")
    return found


def distrusted(path: Path, data: bytes, runs: dict[str, Signature], known: frozenset[str]) -> list[str]:
    """A sentence for each run in the file with content `data` that no `known` key has signed in its current form.

    `runs`: the last signature of each run that has one.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise RecordError(MISSING) from None
    found: list[str] = []
    for run in dict.fromkeys(_run_of(line) for line in data.split(b"\n")[:-1]):
        one = runs.get(run)
        if one is None:
            found.append(f"{path}: run {run} is not signed")
        elif one.key not in known:
            found.append(f"{path}: run {run} is signed by {one.key}, which is not among the trusted keys")
        else:
            try:
                Ed25519PublicKey.from_public_bytes(bytes.fromhex(one.key)).verify(
                    bytes.fromhex(one.signature), _digest(data, run)
                )
            except (InvalidSignature, ValueError):
                found.append(f"{path}: the signature of run {run} does not fit its lines: they were changed")
    return found


def _digest(data: bytes, run: str) -> bytes:
    whole = hashlib.sha256(b"megamoe run\n")
    for line in data.split(b"\n")[:-1]:
        if _run_of(line) == run and _kind_of(line) != "signature":
            whole.update(line + b"\n")
    return whole.digest()


def _run_of(line: bytes) -> str:
    return str(json.loads(line).get("run"))


def _kind_of(line: bytes) -> str:
    return str(json.loads(line).get("kind"))
