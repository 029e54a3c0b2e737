"""Pictures of every kind, against numpy and against torchvision."""

import io

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, pil_loader

from rmd_plugin.files import PICTURE_ENDINGS, DataFormatError, is_picture, read_picture

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
GREY = PIXELS[..., 0]
DEEP = np.random.default_rng(1).integers(0, 1 << 16, (6, 9)).astype(np.uint16)


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels(content):
    image = read_picture(io.BytesIO(content))
    assert image.mode == "RGB"
    return np.asarray(image)


def test_a_plain_picture_is_what_torchvision_reads(tmp_path):
    for kind in ("PNG", "TIFF", "JPEG", "WEBP"):
        (tmp_path / "a").write_bytes(encoded(Image.fromarray(PIXELS), kind))
        np.testing.assert_array_equal(np.asarray(read_picture(tmp_path / "a")), np.asarray(pil_loader(tmp_path / "a")))


def test_grey_has_three_equal_channels_and_alpha_is_dropped():
    np.testing.assert_array_equal(pixels(encoded(Image.fromarray(GREY))), np.stack([GREY] * 3, axis=2))
    np.testing.assert_array_equal(pixels(encoded(Image.fromarray(np.dstack([PIXELS, GREY])))), PIXELS)


def test_a_palette_gives_its_colours_whatever_is_transparent():
    palette = np.random.default_rng(2).integers(0, 256, (16, 3), dtype=np.uint8)
    image = Image.fromarray(GREY % 16)
    image.putpalette(palette.tobytes())
    np.testing.assert_array_equal(pixels(encoded(image, transparency=3)), palette[GREY % 16])


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_of_sixteen_bits_the_upper_eight_are_taken(kind):
    np.testing.assert_array_equal(pixels(encoded(Image.fromarray(DEEP), kind))[..., 2], DEEP >> 8)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_numbers_whose_white_is_unknown_are_refused(dtype):
    with pytest.raises(DataFormatError, match="16 bits"):
        pixels(encoded(Image.fromarray(DEEP.astype(dtype)), "TIFF"))


def test_the_rotation_of_a_camera_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    np.testing.assert_array_equal(pixels(encoded(Image.fromarray(PIXELS), exif=exif)), np.rot90(PIXELS, -1))


def test_a_file_that_is_cut_off_or_of_another_kind_is_refused_by_name(tmp_path):
    good = encoded(Image.fromarray(PIXELS), "JPEG")
    program = encoded(Image.fromarray(PIXELS), "EPS")  # Ghostscript would run it
    for content in (good[: len(good) // 2], b"no picture", b"", program):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(DataFormatError, match=r"a\.png"):
            read_picture(tmp_path / "a.png")
    with pytest.raises(DataFormatError) as error:
        read_picture(io.BytesIO(b"no picture"), "a.png")
    assert "object at" not in str(error.value)
    with pytest.raises(FileNotFoundError):
        read_picture(tmp_path / "missing.png")


def test_pictures_are_known_by_the_endings_of_torchvision():
    assert set(PICTURE_ENDINGS) == set(IMG_EXTENSIONS)
    assert is_picture("a/B.JPG")
    assert not is_picture("a.gif")
