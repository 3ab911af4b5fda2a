"""Rendered lines of text, in the fonts that come with matplotlib."""

import functools
import pathlib
import string

import numpy as np

HEIGHT = 48
"""Height of a line, in pixels, as the networks expect it."""

FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic"),
    *("DejaVuSansMono", "STIXGeneral", "STIXGeneralBol", "cmss10"),
)

_WORDS = """
account address amount animal answer autumn balance battery beautiful because between
bicycle borrow bottle breakfast bridge calendar camera capital carbon ceiling century
channel chapter chemical climate coffee column comfort common company concert content
corner country course credit culture current customer danger daughter decimal degree
delivery desert detail device dinner direct doctor double dozen drawing eastern economy
edition effort electric engine English entry evening example express factor family
fashion feather figure final finger flight flower follow forest formal fortune forward
freedom Friday future garden general glass gravity ground growth guest guitar hammer
harbour harvest health heavy history holiday honest hospital hotel hundred hunger image
income index indoor inside iron island January journey jungle justice kitchen kitten
knife ladder language large lawyer leader letter level liberty library limited liquid
London lounge machine magnet manager March market measure member memory message metal
method midnight minute mirror model Monday morning mountain museum music narrow nation
native network night northern notice number object ocean October office orange orbit
order output oxygen package painter paper parking partner pattern payment pepper people
perfect period person picture pilot planet plastic pocket poem police position potato
power present price prince printer private problem product profit program public purple
quality quarter question quick quiet radio railway random ready receipt record region
report result return river rocket salad sample scheme school science season second
section server seven shadow shelter signal silver simple sister smooth society soldier
source south spring square station stream street student summer sunday supply surface
sweet symbol system table target teacher temple theory thunder ticket timber tomato
total travel treasure tunnel twelve union unique upper useful valley value vector
village violin visit voice volume wagon water weather wedding weight western window
winter wisdom wonder worker yellow zebra
"""

WORDS = _WORDS.split()


def phrase(rng: np.random.Generator, longest: int) -> str:
    """Words, and numbers among them, of at most as many characters."""
    text = ""
    while True:
        kind = rng.integers(5)
        if kind == 0:
            digits = rng.choice(list(string.digits), rng.integers(1, 6))
            word = "".join(digits)
        else:
            word = str(rng.choice(WORDS))
            if kind == 1:
                word = word.capitalize()
            elif kind == 2:
                word = word.upper()
        longer = f"{text} {word}".strip()
        if len(longer) > longest:
            return text or word[:longest]
        text = longer


@functools.cache
def font(name: str, size: int):
    """A font of matplotlib's at a size in pixels."""
    import matplotlib
    from PIL import ImageFont

    folder = pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf")
    return ImageFont.truetype(str(folder / f"{name}.ttf"), size)


def line(
    rng: np.random.Generator, text: str, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws text in a random font and colors.

    Returns:
        The image with a margin around the text, and its background color.
    """
    from PIL import Image, ImageDraw

    drawn = font(str(rng.choice(FONTS)), size)
    left, top, right, bottom = drawn.getbbox(text)
    margins = rng.integers(2, max(3, size // 4), 4)
    width = right - left + margins[0] + margins[1]
    height = bottom - top + margins[2] + margins[3]
    light, dark = rng.integers(150, 256, 3), rng.integers(0, 90, 3)
    ink, ground = (light, dark) if rng.random() < 0.2 else (dark, light)
    image = Image.new("RGB", (int(width), int(height)), tuple(map(int, ground)))
    place = (int(margins[0]) - left, int(margins[2]) - top)
    ImageDraw.Draw(image).text(place, text, tuple(map(int, ink)), drawn)
    return np.asarray(image), ground


def degraded(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """The image at a lower resolution, with a gradient of light and noise.

    Returns:
        Floats, of the values of pixels.
    """
    from PIL import Image

    height, width = image.shape[:2]
    scale = rng.uniform(0.35, 0.9)
    small = (max(1, int(width * scale)), max(1, int(height * scale)))
    coarse = Image.fromarray(image).resize(small, Image.Resampling.BILINEAR)
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    light = np.linspace(*rng.uniform(0.75, 1.1, 2), width)[None, :, None]
    noise = rng.normal(0, rng.uniform(2, 16), pixels.shape)
    return np.clip(pixels * light + noise, 0, 255)


def strip(pixels: np.ndarray, width: int) -> np.ndarray:
    """A line as an input of the networks: CHW, -1 to 1, `HEIGHT` high, padded."""
    from PIL import Image

    image = Image.fromarray(np.round(pixels).astype(np.uint8))
    scaled = min(width, max(1, round(image.width * HEIGHT / image.height)))
    image = image.resize((scaled, HEIGHT), Image.Resampling.BILINEAR)
    result = np.zeros((3, HEIGHT, width), np.float32)
    result[:, :, :scaled] = normalized(np.asarray(image))
    return result


def normalized(pixels: np.ndarray) -> np.ndarray:
    """RGB of 0 to 255 as BGR of -1 to 1, channels first."""
    return (pixels[..., ::-1].astype(np.float32) / 127.5 - 1).transpose(2, 0, 1)
