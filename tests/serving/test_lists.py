"""Lists of jobs, page by page, as OpenAI's client reads them."""

from pathlib import Path
from typing import Any

from comfy_tpu.jobs.worker_thread import GROUPS_AHEAD
from tests.serving.stand_in import running
from tests.serving.test_api import create, wait_for

KEYS = {"ann": "a-key-of-ann-0001", "bob": "a-key-of-bob-0001"}


def pages(client: Any, after_page: Any = lambda ids: None, **options: Any) -> list[str]:
    """The ids of all videos, as OpenAI's client goes through them."""
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        answer = client.get("/v1/videos", params={**options, **after}).json()
        ids = [each["id"] for each in answer["data"]]
        assert (answer["first_id"], answer["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
        found += ids
        after_page(ids)
        if not answer["has_more"]:
            return found
        after = {"after": ids[-1]}


def test_pages_in_both_orders(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        made = [create(client, f"{number}")["id"] for number in range(7)]
        assert pages(client, limit=3) == made[::-1]
        assert pages(client, limit=3, order="asc") == made
        assert pages(client, limit=7) == made[::-1]
        assert client.get("/v1/videos", params={"after": ""}).status_code == 200


def test_everything_is_deleted_page_by_page(tmp_path: Path) -> None:
    """`for video in client.videos.list(): client.videos.delete(video.id)`: the next page is behind one that is gone."""
    with running(tmp_path) as (client, _, _):
        made = [create(client)["id"] for _ in range(7)]

        def delete(ids: list[str]) -> None:
            for id_ in ids:
                assert client.delete(f"/v1/videos/{id_}").status_code == 200

        assert pages(client, delete, limit=3) == made[::-1]
        assert pages(client) == []


def test_what_is_no_id_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        for after in ("nothing", f"image_{'0' * 24}", f"video_{'0' * 23}", f"video_{'0' * 24}\n", "' OR 1=1 --"):
            answer = client.get("/v1/videos", params={"after": after})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after"), after


def test_each_client_has_its_share_of_a_full_queue(tmp_path: Path) -> None:
    from comfy_tpu.serving.config import Limits

    with running(tmp_path, keys=KEYS, limits=Limits(queued_jobs=4)) as (client, _, executor):
        ann, bob = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
        for _ in range(GROUPS_AHEAD):  # those that the worker takes, and none later
            taken = client.post("/v1/videos", json={"prompt": "wait"}, headers=ann).json()
            wait_for(client, taken["id"], "in_progress", headers=ann)
        while client.post("/v1/videos", json={"prompt": "wait"}, headers=ann).status_code == 200:
            pass
        statuses = [client.post("/v1/videos", json={"prompt": "wait"}, headers=bob).status_code for _ in range(4)]
        assert statuses == [200, 200, 429, 429]
        executor.may_go_on.set()
