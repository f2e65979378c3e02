"""Redirects of a web server, followed and not."""

import pytest

from shardvit.data_shards.store.store import Store, StoreError
from tests.data_shards.http_server import FaultServer
from tests.data_shards.opened import content_of, make_entry, make_tar


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/a.tar", "it redirects again and again"),
        ("file:///etc/passwd", "it redirects to file:///etc/passwd, which is no http or https"),
        ("ftp://127.0.0.1/a.tar", "no http or https"),
        ("http://169.254.169.254/latest", "within this machine or a private network"),
        ("//[::ffff:10.1.2.3]:80/", "within this machine or a private network"),
        ("http://0x0a010203/a.tar", "within this machine or a private network"),
        ("http://[nonsense/", "cannot be read"),
        ("URI http://169.254.169.254/latest", "within this machine or a private network"),
        ("", "HTTP status 302"),
    ],
)
def test_a_redirect_that_is_not_followed_ends_at_once(place: str, reason: str, server: FaultServer, store: Store):
    server.redirects["/a.tar"] = place
    with pytest.raises(StoreError, match="check the location") as caught:
        store.open(make_entry(f"{server.url}/a.tar"))
    assert reason in str(caught.value)
    assert len(server.requests) == (10 if place == "/a.tar" else 1)


def test_a_redirect_leads_into_this_machine_only_from_there(
    server: FaultServer, store: Store, monkeypatch: pytest.MonkeyPatch
):
    outside, place = "http://203.0.113.7/a.tar", server.url.replace("127.0.0.1", "localhost") + "/b.tar"
    server.files["/b.tar"] = make_tar(0)
    server.redirects |= {"/a.tar": place, outside: place}
    assert content_of(store, make_entry(f"{server.url}/a.tar")) == make_tar(0)
    server.requests.clear()
    monkeypatch.setenv("http_proxy", server.url)  # stands for the internet
    with pytest.raises(StoreError, match=f"redirects to {place}, within this machine"):
        store.open(make_entry(outside))
    assert [path for _, path, _ in server.requests] == [outside]
