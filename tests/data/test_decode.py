"""Every picture becomes 8-bit RGB in one place: values of more bits are scaled, not clipped."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from coder_plugin.data import open_source
from coder_plugin.data.bad_samples import BadSample
from coder_plugin.data.decode import decode_image, from_picture, set_max_pixels
from coder_plugin.errors import CoderError
from tests import fresh


def grey(*values: float, dtype: str, kind: str = "TIFF") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.array([values], dtype=dtype)).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype, kind", [("<u2", "PNG"), ("<u2", "TIFF"), (">u2", "TIFF")])
def test_16_bits_become_8_by_257(dtype, kind):
    values = [0, 127, 129, 257, 4095, 32768, 65535]
    decoded = np.asarray(decode_image(grey(*values, dtype=dtype, kind=kind)))
    assert decoded[0, :, 0].tolist() == [0, 0, 1, 1, 16, 128, 255] and (decoded == decoded[..., :1]).all()
    assert np.asarray(decode_image(grey(0, 255, dtype=dtype, kind=kind)))[0, :, 0].tolist() == [0, 1]  # dark stays dark


@pytest.mark.parametrize(
    "dtype, values, expected",
    [
        ("f4", [0, 0.5, 1], [0, 128, 255]),
        ("f4", [0.25, 0.5], [64, 128]),  # not stretched
        ("f4", [0, 10.4, 255], [0, 10, 255]),
        ("f4", [257, 65535], [1, 255]),
        ("f4", [-1, 0, 1], [0, 128, 255]),
        ("f4", [0, 1e6], [0, 255]),
        ("f4", [-7, -7], [0, 0]),
        ("i4", [0, 1, 255], [0, 1, 255]),
        ("i4", [0, 257, 65535], [0, 1, 255]),
        ("i4", [0, 1 << 20, 1 << 21], [0, 128, 255]),
    ],
)
def test_floats_and_32_bit_integers_by_the_first_range_that_has_their_values(dtype, values, expected):
    assert np.asarray(decode_image(grey(*values, dtype=dtype)))[0, :, 0].tolist() == expected


def test_open_pictures_are_scaled_too_and_values_that_are_not_finite_are_refused():
    assert from_picture(Image.fromarray(np.array([[65535, 0]], dtype="u2"))).getpixel((0, 0)) == (255, 255, 255)
    for value in (np.nan, np.inf):
        with pytest.raises(BadSample, match="not finite"):
            decode_image(grey(0, value, dtype="f4"))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK", "LA"])
def test_other_modes_become_rgb_as_in_pillow(mode):
    buffer = io.BytesIO()
    picture = Image.new("RGB", (6, 4), (9, 8, 7)).convert(mode)
    picture.save(buffer, "TIFF")
    assert decode_image(buffer.getvalue()).tobytes() == picture.convert("RGB").tobytes()


def test_every_reader_scales(tmp_path):
    datasets = pytest.importorskip("datasets")
    content = grey(0, 65535, dtype="u2", kind="PNG")
    (tmp_path / "a.png").write_bytes(content)
    (tmp_path / "a.csv").write_text("filepath,title\na.png,a ramp\n")
    rows = datasets.Dataset.from_dict({"image": [{"bytes": content, "path": None}], "caption": ["a ramp"]})
    for spec in (str(tmp_path / "a.csv"), rows, rows.cast_column("image", datasets.Image())):
        (_, item), = open_source(spec).items()
        assert [item.load().getpixel((x, 0))[0] for x in (0, 1)] == [0, 255]


CHILD = "from tests.data.test_decode import *; print(decode_image(grey(*range(30), dtype='u1', kind='PNG')).size)"


def test_the_limit_on_pixels_is_one_setting_of_the_process_and_of_those_it_starts():
    content = grey(*range(30), dtype="u1", kind="PNG")
    try:
        set_max_pixels(29)
        with pytest.raises(BadSample, match="30 x 1 pixels are more than the 29 that --max-image-pixels allows"):
            decode_image(content)
        assert decode_image(content, max_pixels=30).size == (30, 1)
        done = fresh.run(["-c", CHILD])
        assert done.returncode and "more than the 29" in done.stderr
        for wrong in (0, 178_956_971):
            with pytest.raises(CoderError, match="must be 1 to 178,956,970"):
                set_max_pixels(wrong)
    finally:
        set_max_pixels(None)
    assert decode_image(content).size == (30, 1)
