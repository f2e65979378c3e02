"""Locations are parsed, and shown without secrets."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.location import (
    expand_braces,
    is_local,
    join,
    local_path,
    protocol,
    redact_text,
    redacted,
)

# Marked, so that its letters cannot be in the rest of the URL by chance.
secrets = st.text(string.ascii_letters + string.digits + "!$&()*+,;=._~%-", min_size=2, max_size=12).map(
    lambda text: f"ZZ{text}ZZ"
)


@given(user=secrets, password=secrets, signature=secrets, scheme=st.sampled_from(["http", "https", "s3", "sftp"]))
def test_no_secret_of_a_url_is_shown(user: str, password: str, signature: str, scheme: str):
    url = f"{scheme}://{user}:{password}@host:8080/a/b@2.tar?sig={signature}#{signature}"
    assert redacted(url) == f"{scheme}://host:8080/a/b@2.tar"
    assert redacted(f"x.tar::{url}::{url}") == f"x.tar::{redacted(url)}::{redacted(url)}"
    assert "ZZ" not in redact_text(f"cannot get '{url}' (403), tried {url}")


@given(password=st.text(string.ascii_letters + "/?#", min_size=1, max_size=8).map(lambda text: f"ZZ{text}ZZ"))
def test_no_password_is_shown_that_is_not_quoted_as_it_should(password: str):
    assert redacted(f"https://user:{password}@host/x.tar") == "https://host/x.tar"


@given(token=secrets)
def test_no_word_of_a_pipe_is_shown_but_the_program_and_the_tar(token: str):
    url = (
        f"pipe:TOKEN={token} curl -s -H 'Authorization: Bearer {token}' https://u:{token}@host/train-007.tar?s={token}"
    )
    assert redacted(url) == "pipe:curl ... train-007.tar"
    assert "ZZ" not in redact_text(f"sh: curl -H 'Authorization: Bearer {token}': not found", url=url)
    assert "curl" in redact_text("sh: curl: not found", url=url)


@pytest.mark.parametrize(
    "location",
    [
        "relative/folder",
        "/data/what?/a#b@c:d",
        "s3://bucket/train@v2/x-{000..127}.tar",
        "https://host:8080/x.tar",
        "http://[::1]:80/x.tar",
        "a-{0..3}.tar::s3://b/x.tar",
        "file:///data/x.tar",
    ],
)
def test_what_holds_no_secret_is_shown_as_it_is(location: str):
    assert redacted(location) == location


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("a/b", "file"),
        ("/a:b", "file"),
        ("file:/a", "file"),
        ("file:///a", "file"),
        ("S3://b/c", "s3"),
        ("pipe:x", "pipe"),
    ],
)
def test_kinds_of_locations(location: str, kind: str):
    assert protocol(location) == kind
    assert is_local(location) == (kind == "file")


def test_local_paths():
    assert str(local_path("file:///a/b")) == str(local_path("file:/a/b")) == str(local_path("/a/b")) == "/a/b"


def test_join_keeps_the_query_and_quotes_for_http():
    assert join("/a/b/", "c/d.tar") == "/a/b/c/d.tar"
    assert join("s3://bucket/a/", "c d.tar") == "s3://bucket/a/c d.tar"
    assert join("https://u:p@host/a?sig=1/2", "c d#1.tar") == "https://u:p@host/a/c%20d%231.tar?sig=1/2"
    with pytest.raises(UserError, match="command, not a folder"):
        join("pipe:cat x", "a.tar")


@pytest.mark.parametrize(
    "pattern",
    ["x.tar", "x-{000..011}.tar", "{train,val}-{0..2}.tar", "s3://b/{08..11}.tar::c-{a..c}.tar", "x-{10..0..5}.tar"],
)
def test_patterns_are_webdatasets(pattern: str):
    shardlists = pytest.importorskip("webdataset.shardlists")
    assert expand_braces(pattern) == shardlists.expand_urls(pattern)


def test_patterns_of_pipes_and_addresses():
    assert expand_braces("pipe:perl -MA::B x-{0..1}::pipe:cat y") == [
        "pipe:perl -MA::B x-0",
        "pipe:perl -MA::B x-1",
        "pipe:cat y",
    ]
    assert expand_braces("http://[fe80::1]/{0..1}.tar") == ["http://[fe80::1]/0.tar", "http://[fe80::1]/1.tar"]
    with pytest.raises(UserError, match="brace") as caught:
        expand_braces("https://u:secret@host/{0..3.tar")
    assert "secret" not in str(caught.value)


def test_a_variable_may_not_bring_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a location is local, or a command, is read from its text."""
    for name, value in (("HERE", "/data"), ("BUCKET", "s3://b"), ("PROGRAM", "ais://b")):
        monkeypatch.setenv(f"WDS_{name}", value)
    assert expand_braces("${HERE}/x-{0..1}.tar") == ["/data/x-0.tar", "/data/x-1.tar"]
    for name in ("BUCKET", "PROGRAM"):
        with pytest.raises(UserError, match="scheme"):
            expand_braces(f"${{{name}}}/x.tar")
