"""Images that strangers send: hostile ones are refused, unusual ones are seen as people see them."""

import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from comfy_tpu.pipeline.images import read_image
from tests.serving.stand_in import Served, running

RED = (255, 0, 0)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")


def png_bomb(width: int, height: int) -> bytes:
    """A file of a few bytes that says that it has many pixels."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        png_chunk(*each) for each in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    )


def png_with_text(text: bytes) -> bytes:
    """A text that is small when it is compressed."""
    whole = encode(Image.new("RGB", (8, 8)), "PNG")
    return whole[:33] + png_chunk(b"zTXt", b"a\0\0" + zlib.compress(text)) + whole[33:]


FRAMES = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
HOSTILE_IMAGES = {
    "empty": b"",
    "truncated PNG": encode(Image.effect_noise((64, 64), 9), "PNG")[:-700],
    "truncated JPEG": encode(Image.new("RGB", (64, 64)), "JPEG")[:200],
    "bomb": png_bomb(50_000, 50_000),
    "large bomb": png_bomb(2**31 - 1, 2**31 - 1),
    "no pixels": png_bomb(0, 0),
    "text bomb": png_with_text(b"a" * 2**27),
    "long": encode(Image.new("L", (1, 60_000)), "PNG"),
    "wide": encode(Image.new("L", (60_000, 1)), "PNG"),
    "animated PNG": encode(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]),
    "animated WebP": encode(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]),
    "animated GIF": encode(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
    "TIFF": encode(FRAMES[0], "TIFF"),
    "PDF": encode(FRAMES[0], "PDF"),
    "ICO": encode(FRAMES[0], "ICO"),
    "BMP": encode(FRAMES[0], "BMP"),
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(id) system\n",
    "ImageMagick": b"push graphic-context\nfill 'url(https://127.0.0.1/|id)'\n",
    "ZIP": b"PK\x03\x04" + b"\0" * 100,
    "JPEG, then HTML": b"\xff\xd8\xff\xe0<script>alert(1)</script>",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all orders that are refused and leave nothing."""
    with running(tmp_path_factory.mktemp("shared"), "demo-image") as (client, service, _):
        yield client, service


@pytest.mark.parametrize("name", HOSTILE_IMAGES)
@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
def test_hostile_images(name: str, shared: Served) -> None:
    client, service = shared
    files = {"input_reference": ("a.png", HOSTILE_IMAGES[name], "image/png")}
    answer = client.post("/v1/videos", data={"prompt": "a cat"}, files=files)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "image"
    assert service.ledger.counts().total == 0
    assert list(service.inputs.glob("video_*")) == []


def test_images_by_what_they_are_not_by_their_names(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated
    names = ("a.png", "../../../etc/cron.d/a", "a.svg", "a\0b", "a" * 300)
    with running(tmp_path / "served", "demo-image") as (client, service, _):
        for name in names:
            content = encode(Image.new("RGB", (64, 32)), "JPEG", exif=exif)
            answer = client.post("/v1/videos", data={"prompt": "a"}, files={"input_reference": (name, content)})
            assert answer.status_code == 200, answer.text
            (path,) = service.ledger.find(answer.json()["id"]).request.values["image"]
            assert Path(path).parent == tmp_path / "served" / "inputs"
        assert [path.name for path in tmp_path.iterdir()] == ["served"]


def rotated(image: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(image, "JPEG", exif=exif)


@pytest.mark.parametrize(
    ("content", "size", "colour"),
    [
        (encode(Image.new("CMYK", (64, 32), (0, 255, 255, 0)), "JPEG"), (64, 32), RED),
        (encode(Image.new("I;16", (64, 32), 40_000), "PNG"), (64, 32), (155,) * 3),
        (encode(Image.new("RGBA", (64, 32), (255, 0, 0, 9)), "WEBP"), (64, 32), RED),
        (encode(Image.new("L", (64, 32), 7).convert("P"), "PNG", transparency=7), (64, 32), (7,) * 3),
        (encode(Image.new("1", (64, 32), 1), "PNG"), (64, 32), (255,) * 3),
        (rotated(Image.new("RGB", (64, 32), RED)), (32, 64), RED),
    ],
    ids=["CMYK", "16 bits", "transparent", "palette", "1 bit", "rotated by EXIF"],
)
def test_unusual_images_are_seen_as_people_see_them(
    content: bytes, size: tuple[int, int], colour: tuple[int, ...], tmp_path: Path
) -> None:
    with running(tmp_path, "demo-image") as (client, service, executor):
        answer = client.post("/v1/videos", data={"prompt": "wait"}, files={"input_reference": ("a.png", content)})
        assert answer.status_code == 200, answer.text
        (path,) = service.ledger.find(answer.json()["id"]).request.values["image"]
        image = read_image(Path(path))
        assert (image.mode, image.size) == ("RGB", size)
        assert image.getpixel((0, 0)) == pytest.approx(colour, abs=3)
        executor.may_go_on.set()
