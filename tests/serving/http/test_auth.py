"""Who is let through to which path."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from branchline.serving.http.auth import KeyGuard, key_of
from branchline.serving.serve_config import ServeConfig

REQUESTS = ("/v1/completions", "/v1/models", "/v1/models/x", "/docs", "/not-thought-of", "//health")
ADMINS = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters", "/adapters",
    "/adapters/org/sql", "/audit", "/audit/", "/audit/page", "/v1/load_lora_adapter/",
)  # fmt: skip
OPEN = ("/health", "/ready", "/version", "/metrics", "/")


class Guarded:
    """A guard before an application that answers everything."""

    def __init__(self, **keys) -> None:
        self.refused: list[int] = []

        async def told(request: Request) -> PlainTextResponse:
            return PlainTextResponse(key_of(request) or "no key")

        app = Starlette(routes=[Route("/{path:path}", told, methods=["GET", "POST"])])
        guard = KeyGuard(app, ServeConfig.checked(**keys), self.refused.append)
        self.client = TestClient(guard)

    def get(self, path: str, key: str | None = None, scheme: str = "Bearer"):
        headers = {} if key is None else {"Authorization": f"{scheme} {key}"}
        return self.client.get(f"http://testserver{path}", headers=headers)


def test_without_keys_everything_is_open():
    guarded = Guarded()
    assert {guarded.get(path).status_code for path in (*REQUESTS, *ADMINS, *OPEN)} == {200}


def test_what_probes_and_scrapers_read_is_open():
    guarded = Guarded(api_key="a", admin_key="b")
    assert {guarded.get(path).status_code for path in OPEN} == {200}


@pytest.mark.parametrize("path", [*REQUESTS, *ADMINS])
def test_a_key_is_asked_for_everywhere_else(path):
    guarded = Guarded(api_key=("a", "b"))
    assert guarded.get(path, "a").status_code == 200
    assert guarded.get(path, "b").status_code == 200
    for key in (None, "c", "", "aa", "A", "a b"):
        assert guarded.get(path, key).status_code == 401, key


@pytest.mark.parametrize("path", ADMINS)
def test_an_administrator_s_path_asks_for_his_key(path):
    guarded = Guarded(api_key="a", admin_key="b")
    assert guarded.get(path, "b").status_code == 200
    assert guarded.get(path, "a").status_code == 403
    assert guarded.get(path, "c").status_code == 401
    assert guarded.get(path).status_code == 401


@pytest.mark.parametrize("keys", [{"admin_key": "b"}, {"api_key": "a", "admin_key": "b"}, {}])
@pytest.mark.parametrize("end", ["%0a", "%0d", "%0d%0a", "%00", "%1f", "%7f", "%e2%80%a8"])
@pytest.mark.parametrize("path", ["/v1/adapters", "/v1/load_lora_adapter", "/audit", "/health"])
def test_no_path_ends_in_what_a_route_s_pattern_overlooks(path, end, keys):
    # "$" in a pattern also matches before a line's end.
    assert Guarded(**keys).get(path + end, "a").status_code == 400


@pytest.mark.parametrize("path", REQUESTS)
def test_an_administrator_may_ask_for_answers_too(path):
    guarded = Guarded(api_key="a", admin_key="b")
    assert guarded.get(path, "b").status_code == 200


def test_an_administrator_s_key_alone_leaves_requests_open():
    guarded = Guarded(admin_key="b")
    assert guarded.get("/v1/completions").status_code == 200
    assert guarded.get("/audit").status_code == 401


def test_the_refusal_has_openai_s_shape():
    guarded = Guarded(api_key="secret")
    answer = guarded.get("/v1/models", "wrong-key")
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_api_key"
    assert "wrong-key" not in answer.text
    assert "secret" not in answer.text
    assert guarded.refused == [401]


def test_the_scheme_is_bearer_in_any_case_and_nothing_else():
    guarded = Guarded(api_key="a")
    assert guarded.get("/v1/models", "a", "bearer").status_code == 200
    assert guarded.get("/v1/models", "a", "Basic").status_code == 401
    twice = [("Authorization", "Bearer a"), ("Authorization", "Bearer b")]
    assert guarded.client.get("/v1/models", headers=twice).status_code == 401


def test_requests_of_one_key_are_known_by_something_that_is_no_key():
    guarded = Guarded(api_key=("alpha", "beta"))
    alpha, beta = (guarded.get("/v1/models", key).text for key in ("alpha", "beta"))
    assert alpha == guarded.get("/v1/models", "alpha").text
    assert alpha != beta
    assert "alpha" not in alpha
    assert Guarded().get("/v1/models", "anything").text == "no key"


def test_a_key_from_a_file_may_end_in_a_line_break():
    assert Guarded(api_key="a\n").get("/v1/models", "a").status_code == 200
