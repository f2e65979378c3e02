"""Which redirects of a web server are followed: to http and https alone, and into this machine or a private network
only from the same host, by its name or its address.

So whoever serves shards to the world cannot have this machine ask what only this machine can reach, such as a cloud's
metadata at 169.254.169.254. Ten in a row are aiohttp's limit; it sends no credentials to another host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

from data_shards.shards.location import redact_text
from data_shards.store.remote_errors import Refused


def redirect_rule() -> Any:
    """An `aiohttp.TraceConfig` for a session, whose requests then raise `Refused` at what is not followed."""
    from aiohttp import TraceConfig

    rule = TraceConfig()
    rule.on_request_redirect.append(_demand_allowed)
    return rule


async def _demand_allowed(session: Any, context: Any, redirect: Any) -> None:
    url = redirect.url
    headers = redirect.response.headers
    place = url.join(type(url)(headers.get("Location") or headers.get("URI") or ""))  # as aiohttp looks for it
    if place.scheme not in ("http", "https"):
        why = "which is no http or https"
    elif place.host != url.host and await _inner_addresses(place.host) - await _inner_addresses(url.host):
        why = "within this machine or a private network"
    else:
        return
    redirect.response.close()
    raise Refused(f"it redirects to {redact_text(str(place))[:300]}, {why}")


async def _inner_addresses(host: str) -> set[str]:
    """Those of a host that are not of the public internet; none if its name is unknown here."""
    try:
        found: list[Any] = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the request itself will fail, or a proxy knows the name
        return set()
    addresses = [ipaddress.ip_address(address[0]) for *_, address in found]
    inner = [each for each in (getattr(each, "ipv4_mapped", None) or each for each in addresses) if not each.is_global]
    return {"this machine" if each.is_loopback or each.is_unspecified else str(each) for each in inner}
