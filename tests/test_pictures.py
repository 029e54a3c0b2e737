"""Pictures of every kind: the table of rmd_plugin/pictures.py, line by line, against numpy and against torchvision."""

import io
import os
import struct
import tracemalloc
import zlib

import numpy as np
import PIL
import pytest
from PIL import Image, ImageCms
from torchvision.datasets.folder import IMG_EXTENSIONS, pil_loader

from rmd_plugin.pictures import EXTENSIONS, bad_pictures, decode_picture, is_picture, read_picture
from rmd_plugin.untrusted import DataFormatError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
RGB = Image.fromarray(PIXELS)
GREY = PIXELS[..., 0]
DEEP = np.random.default_rng(1).integers(0, 1 << 16, (6, 9)).astype(np.uint16)
RED, GREEN = Image.new("RGB", (9, 6), "red"), Image.new("RGB", (9, 6), "lime")
ORIENTATION = 0x0112


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels(content):
    """What decoding gives; the quick check must have taken it too."""
    assert bad_pictures(1, lambda _: (content, "a.png")) == {}
    image = decode_picture(content)
    assert image.mode == "RGB"
    return np.asarray(image)


def refused(content):
    """The one reason why both refuse it."""
    with pytest.raises(DataFormatError) as caught:
        decode_picture(content, "folder/a.png")
    message = caught.value.reason
    assert bad_pictures(1, lambda _: (content, "folder/a.png")) == {0: f"folder/a.png: {message}"}
    return message


def png(width, height, depth, colour, raw, *chunks):
    """A PNG by the letter of its specification."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def tiff(bits, sample_format, data, width=4, height=2):
    """A grey TIFF of one strip by the letter of its specification."""
    entries = [(256, 3, width), (257, 3, height), (258, 3, bits), (259, 3, 1), (262, 3, 1), (273, 4, 8),
               (277, 3, 1), (278, 3, height), (279, 4, len(data)), (339, 3, sample_format)]  # fmt: skip
    fields = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(entries)) + fields + bytes(4)


@pytest.mark.parametrize("kind", ["PNG", "PPM", "BMP", "TIFF"])
def test_pictures_in_rgb_keep_every_pixel(kind):
    np.testing.assert_array_equal(pixels(encoded(RGB, kind)), PIXELS)


def test_lossy_pictures_are_what_torchvision_reads(tmp_path):
    for kind in ("JPEG", "WEBP"):
        (tmp_path / "a").write_bytes(encoded(RGB, kind))
        np.testing.assert_array_equal(np.asarray(read_picture(tmp_path / "a")), np.asarray(pil_loader(tmp_path / "a")))


@pytest.mark.parametrize("kind", ["PNG", "PPM", "BMP", "TIFF"])
def test_grey_and_black_and_white_have_three_equal_channels(kind):
    np.testing.assert_array_equal(pixels(encoded(Image.fromarray(GREY), kind)), np.stack([GREY] * 3, axis=2))
    bits = GREY > 127
    np.testing.assert_array_equal(pixels(encoded(Image.fromarray(bits), kind))[..., 1], 255 * bits)


@pytest.mark.parametrize("transparency", [None, 3, bytes(range(16))])
def test_a_palette_gives_its_colours_and_its_transparency_is_dropped(transparency):
    palette = np.random.default_rng(2).integers(0, 256, (16, 3), dtype=np.uint8)
    image = Image.fromarray(GREY % 16)
    image.putpalette(palette.tobytes())
    more = {} if transparency is None else {"transparency": transparency}
    np.testing.assert_array_equal(pixels(encoded(image, **more)), palette[GREY % 16])


def test_the_colours_below_an_alpha_channel_stay_as_torchvision_keeps_them(tmp_path):
    alpha = Image.fromarray(np.dstack([PIXELS, GREY]))
    (tmp_path / "a.png").write_bytes(encoded(alpha))
    np.testing.assert_array_equal(pixels(encoded(alpha)), PIXELS)
    np.testing.assert_array_equal(np.asarray(pil_loader(tmp_path / "a.png")), PIXELS)
    grey = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(PIXELS[..., 1])])
    np.testing.assert_array_equal(pixels(encoded(grey)), np.stack([GREY] * 3, axis=2))


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_cmyk_is_ink_that_takes_light_away(kind):
    inks = {(0, 0, 0, 0): (255, 255, 255), (255, 0, 0, 0): (0, 255, 255), (0, 0, 0, 255): (0, 0, 0)}
    for ink, light in inks.items():
        found = pixels(encoded(Image.new("CMYK", (16, 16), ink), kind))
        np.testing.assert_allclose(found, np.broadcast_to(light, found.shape), atol=2)


def test_ycbcr_and_lab_become_the_rgb_that_they_were():
    smooth = Image.new("RGB", (16, 16), (200, 60, 90))
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(smooth, to_lab)
    old = tuple(map(int, PIL.__version__.split(".")[:1])) < (13,)  # does not read YCbCr in TIFF: refused
    for image in (lab,) if old else (smooth.convert("YCbCr"), lab):
        found = pixels(encoded(image, "TIFF"))
        np.testing.assert_allclose(found, np.asarray(smooth), atol=4)


@pytest.mark.parametrize("size", [(1, 1), (7, 40), (90, 3)])
def test_tiny_pictures_are_good_pictures(size):
    content = encoded(Image.new("RGB", size, (200, 60, 90)), "JPEG")
    assert decode_picture(content).size == size
    assert bad_pictures(1, lambda index: (content, "a.jpg")) == {}


def test_of_16_bits_the_upper_8_are_taken():
    upper = np.stack([DEEP >> 8] * 3, axis=2)
    for kind in ("PNG", "TIFF", "PPM"):
        np.testing.assert_array_equal(pixels(encoded(Image.fromarray(DEEP), kind)), upper)
    colours = np.random.default_rng(3).integers(0, 1 << 16, (4, 5, 3))
    raw = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colours)
    np.testing.assert_array_equal(pixels(png(5, 4, 16, 2, raw)), colours >> 8)


def test_numbers_whose_white_is_unknown_are_refused():
    values = np.arange(8, dtype=np.int32)
    for bits, kind, data, reason in [
        (32, 2, values.tobytes(), "signed numbers of 32 bits"),
        (32, 1, values.tobytes(), "numbers of 32 bits"),
        (16, 2, values.astype("i2").tobytes(), "signed numbers of 16 bits"),
        (12, 1, bytes(12), "numbers of 12 bits"),
        (32, 3, values.astype("f4").tobytes(), "floating-point numbers of 32 bits"),
    ]:
        message = refused(tiff(bits, kind, data))
        assert message == f"is not a readable picture: {reason}; 8 or 16 are expected"
    assert pixels(tiff(16, 1, (values << 8).astype("u2").tobytes()))[1, 3, 0] == 7
    assert pixels(tiff(8, 1, values.astype("u1").tobytes()))[1, 3, 0] == 7


@pytest.mark.parametrize(
    ("orientation", "stored_from_upright"),
    {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: np.rot90(x, 1),
        7: lambda x: x[::-1, ::-1].transpose(1, 0, 2),
        8: lambda x: np.rot90(x, -1),
    }.items(),
)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_a_rotation_by_exif_is_applied(orientation, stored_from_upright, kind):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    stored = np.ascontiguousarray(stored_from_upright(PIXELS))
    np.testing.assert_array_equal(pixels(encoded(Image.fromarray(stored), kind, exif=exif)), PIXELS)


@pytest.mark.parametrize("exif", [b"", b"MM\0", b"II*\0\xff\xff\xff\xff", bytes(range(200))])
def test_exif_that_cannot_be_read_rotates_nothing(exif):
    chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif + struct.pack(">I", zlib.crc32(b"eXIf" + exif))
    raw = b"".join(b"\0" + row.tobytes() for row in PIXELS)
    np.testing.assert_array_equal(pixels(png(9, 6, 8, 2, raw, chunk)), PIXELS)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    found = pixels(encoded(RED, kind, save_all=True, append_images=[GREEN, RED], **options))
    np.testing.assert_array_equal(found, np.asarray(RED))


@pytest.mark.parametrize("kind", ["PNG", "PPM", "BMP", "TIFF", "WEBP", "JPEG", "GIF"])
def test_a_truncated_picture_is_refused_wherever_it_ends(kind):
    large = Image.fromarray(np.random.default_rng(4).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    whole = encoded(large, kind)
    pixels(whole)
    for share in (0.0, 0.01, 0.3, 0.6, 0.9):
        assert "readable picture" in refused(whole[: int(share * len(whole))])


def test_a_progressive_jpeg_of_which_a_scan_is_missing_is_refused():
    large = Image.fromarray(np.random.default_rng(4).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    whole = encoded(large, "JPEG", progressive=True)
    assert "truncated" in refused(whole[: int(0.8 * len(whole))])


def test_a_bomb_is_refused_before_it_takes_memory():
    for side in (9_500, 13_000, 60_000):  # beyond our limit, beyond Pillow's warning, beyond its error
        content = png(side, side, 8, 2, b"")
        tracemalloc.start()
        message = refused(content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
        tracemalloc.stop()
        assert "RMD_MAX_GIB=" in message or "decompression bomb" in message


@pytest.mark.slow
def test_the_limit_of_a_picture_can_be_raised_by_one_variable(monkeypatch):
    content = encoded(Image.new("1", (9_500, 9_500)))
    assert "RMD_MAX_GIB=1" in refused(content)
    monkeypatch.setenv("RMD_MAX_GIB", "1")
    assert decode_picture(content).size == (9_500, 9_500)


def test_a_strip_that_a_resize_would_make_huge_is_refused():
    assert pixels(encoded(Image.new("L", (1000, 10)))).shape == (10, 1000, 3)
    assert "a strip of 10 x 1001 pixels" in refused(encoded(Image.new("L", (10, 1001))))


def test_other_formats_are_refused_under_any_ending():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 6\n%%EndComments\nshowpage\n"
    for content in (postscript, encoded(RGB, "JPEG2000"), encoded(RGB, "ICO"), b"", b"no picture", bytes(100)):
        assert refused(content) == "is not a readable picture: none of JPEG, PNG, PPM, BMP, TIFF, WEBP, GIF"


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    for path in (tmp_path / "a.png", tmp_path):
        with pytest.raises(DataFormatError, match="not a regular file"):
            read_picture(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.png"):
        read_picture(tmp_path / "missing.png")


def test_the_bad_ones_among_many_are_found_with_their_reasons(tmp_path):
    good, cut = encoded(RGB), encoded(RGB)[:60]
    contents = {index: cut if index in (7, 150) else good for index in range(200)}

    def read(index):
        if index == 40:
            raise PermissionError(13, "Permission denied", "a40.png")
        return contents[index], f"a{index}.png"

    bad = bad_pictures(200, read)
    assert list(bad) == [7, 40, 150]
    assert bad[7].startswith("a7.png: is not a readable picture")
    assert "Permission denied" in bad[40]
    assert bad_pictures(0, read) == {}


def test_the_endings_are_those_of_torchvision():
    assert set(EXTENSIONS) == set(IMG_EXTENSIONS)
    assert is_picture("a/B.JPG")
    assert not is_picture("a.gif")
    assert not is_picture("png")
