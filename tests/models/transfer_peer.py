"""Greeting of a process that takes part in a KV-cache transfer, for tests that send the other messages themselves."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from pallas_attn.models.engine.kv_transfer.transport import Transport

VERSION = 3
NONCES = {"prefill": "00" * 32, "decode": "11" * 32}


def proof(secret: bytes | None, role: str, nonces: Mapping[str, str]) -> str:
    """Authentication code of a process with this role; empty without a secret."""
    if secret is None:
        return ""
    text = json.dumps(["pallas_attn KV-cache transfer", VERSION, role, nonces["prefill"], nonces["decode"]])
    return hmac.new(secret, text.encode(), "sha256").hexdigest()


def hello(role: str) -> dict[str, Any]:
    return {"kind": "hello", "version": VERSION, "role": role, "nonce": NONCES[role]}


def greet(transport: Transport, role: str, made_for: Mapping[str, Any] | None = None) -> None:
    """Send the greeting of a process with this role, without a secret.

    Args:
      transport: connection to the other process.
      role: "prefill" or "decode".
      made_for: cache format; None to wait for the other process's greeting and send its format back.
    """
    transport.send(hello(role))
    transport.send({"kind": "proof", "code": ""})
    if made_for is None:
        made_for = [transport.receive()[0] for _ in range(3)][-1]["made_for"]
    transport.send({"kind": "format", "made_for": made_for})
