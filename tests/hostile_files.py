"""Image files that are unusual, or far more expensive to decode than their size suggests."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image, PngImagePlugin

RGB = Image.linear_gradient("L").resize((40, 30)).convert("RGB")


def encode(image: Image.Image, format_name: str, **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, format_name, **options)
    return file.getvalue()


# Unusual but valid files


def with_orientation(orientation: int) -> bytes:
    """A JPEG file of 40 x 30 pixels with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(RGB, "JPEG", exif=exif)


def with_palette_transparency() -> bytes:
    """A PNG file with a palette that has an alpha value for three colors."""
    return encode(RGB.quantize(8), "PNG", transparency=bytes((0, 128, 255)))


def animation(format_name: str, frames: int = 300) -> bytes:
    """An animation whose first frame is white."""
    first, *others = [Image.new("L", (8, 6), 255 - number % 256) for number in range(frames)]
    return encode(first.convert("RGB"), format_name, save_all=True, append_images=others)


def with_text(characters: int) -> bytes:
    """A PNG file with an uncompressed comment."""
    comments = PngImagePlugin.PngInfo()
    comments.add_text("comment", "x" * characters)
    return encode(RGB, "PNG", pnginfo=comments)


def with_corrupt_exif() -> bytes:
    """A JPEG file with EXIF orientation 6 and an EXIF field that points outside the block."""
    block = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2)
    block += struct.pack("<HHII", 0x0112, 3, 1, 6) + struct.pack("<HHII", 0x010E, 2, 10**6, 10**6) + bytes(4)
    return encode(RGB, "JPEG", exif=block)


# Decompression bombs


def png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_header(width: int, height: int) -> bytes:
    """A PNG file that declares a size and contains no pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b"")


def png_with_compressed_text(megabytes: int) -> bytes:
    """A PNG file with a compressed comment of this size."""
    comment = png_chunk(b"zTXt", b"comment\0\0" + zlib.compress(bytes(megabytes << 20), 9))
    png = encode(RGB, "PNG")
    return png[:33] + comment + png[33:]


def jpeg_with_scans(count: int) -> bytes:
    """A progressive JPEG file of 2000 x 2000 pixels that repeats its last scan."""
    jpeg = encode(Image.new("L", (2000, 2000), 128), "JPEG", progressive=True)
    start = jpeg.rindex(b"\xff\xda")
    return jpeg[:start] + jpeg[start:-2] * count + jpeg[-2:]


def bmp_with_delta(width: int) -> bytes:
    """A run-length encoded BMP file of one row whose only code skips 255 rows of `width` pixels."""
    header = struct.pack("<IiiHHIIiiII", 40, width, 1, 1, 8, 1, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + 1024) + header + bytes(1024) + b"\0\2\xff\xff"


def tiff_with_tile(side: int) -> bytes:
    """A TIFF file of 64 x 64 pixels in one tile of `side` x `side` bytes."""
    compressor = zlib.compressobj(1)
    tile = b"".join(compressor.compress(bytes(side)) for _ in range(side)) + compressor.flush()
    tags = ((256, 64), (257, 64), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side), (324, 130))
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in (*tags, (325, len(tile)))]
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + tile.rjust(len(tile) + 4, b"\0")


def webp_with_canvas(side: int) -> bytes:
    """An animated WEBP file with small frames on a canvas of `side` x `side` pixels."""
    frames = [RGB.rotate(angle) for angle in (0, 90, 180)]
    file = bytearray(encode(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    start = file.index(b"VP8X") + 12
    file[start : start + 6] = (side - 1).to_bytes(3, "little") * 2
    return bytes(file)
