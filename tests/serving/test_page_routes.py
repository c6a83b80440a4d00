"""The page's files, and what the API has for it: previews, settings, facts of models."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from comfy_tpu.serving import page_routes
from tests.serving.stand_in import running
from tests.serving.test_api import KEYS, create, wait_for

PAGE = Path(page_routes.__file__).parent / "page"


def test_the_page_needs_no_key_and_everything_else_does(tmp_path: Path) -> None:
    with running(tmp_path, keys=KEYS) as (client, _, _):
        for path in page_routes.PAGE_PATHS:
            assert client.get(path).status_code == 200, path
            assert client.post(path).status_code in (401, 405), path
        for path in ("/v1/models", "/v1/videos", "/v1/images", "/page", "/page/", "/page/page.js/x"):
            assert client.get(path).status_code == 401, path


def test_headers(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        answer = client.get("/")
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "*" not in policy
        for path in page_routes.PAGE_PATHS:
            headers = client.get(path).headers
            assert {name: headers[name] for name in page_routes.HEADERS} == page_routes.HEADERS, path


@pytest.mark.parametrize(
    "path",
    [
        "/page/../api.py",
        "/page/%2e%2e/api.py",
        "/page/..%2fapi.py",
        "/page/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/page//etc/passwd",
        "/page/index.html",
        "/page/page.js%00.css",
    ],
)
def test_no_other_file_is_served(path: str, tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        assert client.get(path).status_code == 404


def test_all_files_are_served() -> None:
    served = {path.removeprefix("/page/") for path in page_routes.PAGE_PATHS - {"/"}} | {"index.html"}
    assert served == {path.name for path in PAGE.iterdir()}


def test_the_page_has_nothing_inline_and_nothing_of_others() -> None:
    """The policy would refuse it, and a user's text must not become markup."""
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path.name
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src=)", html)


def flatten(texts: dict[str, object], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, text in texts.items():
        found |= flatten(text, f"{before}{name}.") if isinstance(text, dict) else {f"{before}{name}": str(text)}
    return found


def test_both_languages_have_every_text() -> None:
    texts = json.loads((PAGE / "texts.json").read_text(encoding="utf-8"))
    english, chinese = flatten(texts["en"]), flatten(texts["zh"])
    assert english.keys() == chinese.keys()
    for name, text in english.items():
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", chinese[name])), name
    used = set(re.findall(r'data-text="(\w+)"', (PAGE / "index.html").read_text(encoding="utf-8")))
    for path in PAGE.glob("*.js"):
        used |= set(re.findall(r'\bt\("([\w.]+)"', path.read_text(encoding="utf-8")))
    assert used <= english.keys()


def test_labels() -> None:
    """Every control of the page has a label of its own."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    controls = re.findall(r'<(?:input|select|textarea)\b[^>]*\bid="([^"]+)"', html)
    assert len(controls) > 8
    assert set(re.findall(r'<label for="([^"]+)"', html)) == set(controls)


@pytest.mark.thorough  # by default: events without previews, test_events.py
def test_previews_come_with_events_while_somebody_watches(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, executor):
        made = wait_for(client, create(client, "wait")["id"], "in_progress")
        time.sleep(0.2)
        assert executor.previews_made == 0  # nobody watches
        threading.Timer(1.5, executor.may_go_on.set).start()
        lines = client.get(f"/v1/videos/{made['id']}/events").text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        previews = [event["preview"] for event in events if "preview" in event]
        assert previews[0] == "data:image/jpeg;base64,cHJldmlldyAx"
        assert 2 <= executor.previews_made <= 4  # 0.7 s apart
        assert len(set(previews)) == len(previews)
        assert events[-1]["status"] == "completed"
        assert "preview" not in client.get(f"/v1/videos/{made['id']}").json()


def test_settings_of_a_job_and_facts_of_a_model(tmp_path: Path) -> None:
    with running(tmp_path, common={"dtype": "float32"}) as (client, service, _):
        made = create(client, seed=7, steps=3, negative_prompt="a dog")
        assert made["settings"] | {"seed": 7, "num_inference_steps": 3, "negative_prompt": "a dog"} == made["settings"]
        assert made["settings"]["width"] == service.models["demo"].defaults.width
        assert "dtype" not in made["settings"]
        assert made["has_image"] is False
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["kind"], model["needs_image"], model["has_guidance"]) == ("video", False, True)
        assert model["defaults"]["width"] == 64
        assert model["limits"]["size_multiple"] == service.models["demo"].card.limits.size_multiple
