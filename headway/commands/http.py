"""GET JSON from headway's read-only API, without a proxy and within a bound."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 5.0
MAX_BYTES = 64 * 1024 * 1024
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ApiRefused(ValueError):
    """The API answered with an error: its own `error` and `do`."""


def get(url: str) -> Any:
    """Raises OSError where nothing answers, ApiRefused for an error, ValueError where the answer is no JSON."""
    try:
        with _opener.open(url, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        body = error.read(MAX_BYTES)
        try:
            said = json.loads(body)
            raise ApiRefused(f"{said['error']}: {said.get('do', '')}") from error
        except (ValueError, KeyError, TypeError) as unreadable:
            if isinstance(unreadable, ApiRefused):
                raise
            raise ApiRefused(f"{error.code} {error.reason}") from error


async def get_json(url: str) -> Any:
    return await asyncio.to_thread(get, url)
